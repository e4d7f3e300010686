"""Training of a small hybrid target from scratch and of its DFlash drafter (arXiv 2602.06036, section 4).

`python -m dflash_jax.train` runs the stages: `corpus`, `target`, `responses`, `draft`, and `bundled`, which chains them
all into the pair that ships in `dflash_jax/assets`. The recipes that made that pair are in `recipes/`.
"""
