"""The gated delta rule: chunked prefill, tree form, and commit of an accepted path."""

from pallas_kernels.gdn_scan.api import chunk_delta_rule, commit_path, path_rows, tree_delta_rule

__all__ = ["chunk_delta_rule", "commit_path", "path_rows", "tree_delta_rule"]
