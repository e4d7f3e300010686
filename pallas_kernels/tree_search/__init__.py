"""A draft's candidates and the search for the best prefixes among them."""

from pallas_kernels.tree_search.api import (
    bordered,
    search,
    search_serves,
    top_candidates,
    top_candidates_serve,
)

__all__ = ["bordered", "search", "search_serves", "top_candidates", "top_candidates_serve"]
