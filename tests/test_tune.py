"""Tables of products: what a model has of them, which config is chosen, where tables lie; the tool, interpreted."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks import tune
from benchmarks.shapes import configs
from pallas_kernels.linear import table
from pallas_kernels.linear.configs import Config
from pallas_kernels.linear.table import Product

FAST, FASTER = Config(16, 64, 1, 4, 4), Config(32, 64, 1, 4, 4)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shipped tables in `shipped`, the user's in `dflash-jax/linear`."""
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table.forget()
    yield tmp_path
    table.forget()


def test_the_products_of_a_model_are_those_of_one_device():
    target, drafter = configs("qwen3.6-27b", 4)
    whole, half = (
        {(p.out, p.columns, p.swiglu) for p in tune.products_of(target, drafter, tp)} for tp in (1, 2)
    )
    # Linear layer, attention, MLP and head of the target; attention, MLP and projection of the drafter.
    assert whole == {
        (16480, 5120, False), (5120, 6144, False), (14336, 5120, False), (17408, 5120, True), (5120, 17408, False),
        (248320, 5120, False), (4096, 5120, False), (2048, 5120, False), (5120, 4096, False), (5120, 15360, False),
    }  # fmt: skip
    assert (8240, 5120, False) in half and (8704, 5120, True) in half and (5120, 8704, False) in half
    assert {p.rows for p in tune.products_of(target, drafter, 1)} == set(table.ROWS)


@pytest.mark.parametrize("shape", ["qwen3.6-27b", "bundled"])
def test_candidates_fit_what_they_are_for(shape: str):
    for product in tune.products_of(*configs(shape, 4 if shape != "bundled" else None), 1):
        found = tune.candidates(product, 12)
        assert 1 <= len(found) <= 12 and len(set(found)) == len(found)
        assert all(product.columns % (c.block_in * c.splits) == 0 for c in found)
        assert all(c.splits == 1 for c in found if product.swiglu)
        assert found == tune.candidates(product, 12)


def test_the_fastest_is_chosen_and_of_equals_the_one_that_is_so_in_every_program():
    one, other, row = Product(16, 512, 2048), Product(32, 512, 2048), Product(1, 512, 2048)
    near, far = {"xla": 2.7e-6, FAST: 3e-6, FASTER: 3.1e-6}, {"xla": 2.4e-6, FAST: 3e-6}
    assert tune.choose({one: near, other: far}) == {one: FAST, other: None}
    # A single row of XLA's has no tiles.
    assert tune.choose({row: {"xla": 3e-6, FAST: 2.7e-6}, one: {"xla": 3.0, FAST: 2.0, FASTER: 1.0}}) == {
        row: None, one: FASTER,
    }  # fmt: skip
    assert tune.choose({row: {"xla": 3e-6, FAST: 2.4e-6}}) == {row: FAST}
    split = dataclasses.replace(FAST, splits=2)
    assert tune.choose({one: {"xla": 9e-6, FAST: 3e-6, split: 2.7e-6}}) == {one: FAST}
    assert tune.choose({one: {"xla": 9e-6, FAST: 3e-6, split: 2.4e-6}}) == {one: split}
    assert tune.choose({one: {"xla": 3.0}}) == {one: None}  # nothing compiled


def test_the_users_table_comes_before_the_shipped_one(folders: Path):
    kind, product, other = "NVIDIA Test 1", Product(16, 512, 256), Product(16, 768, 256)
    assert table.file_name(kind) == "nvidia-test-1.json"
    assert table.lookup(kind, product) is None
    table.write(table.SHIPPED / table.file_name(kind), {product: FAST, other: FAST}, {"device": kind})
    table.forget()
    assert table.lookup(kind, product) == FAST and table.lookup("another", product) is None
    assert table.lookup(kind, other) == FAST
    table.write(table.user_folder() / table.file_name(kind), {product: FASTER, other: None}, {"device": kind})
    table.forget()
    assert table.lookup(kind, product) == FASTER and table.lookup(kind, other) is None
    assert table.digest(kind) != table.digest("another") == "[]"
    assert table.user_folder() == folders / "dflash-jax" / "linear"


def test_a_file_that_is_no_table_is_named():
    path = table.user_folder() / table.file_name("x")
    path.parent.mkdir(parents=True)
    for text in ("{", '{"products": [{}]}', '{"products": [{"product": [1], "config": [1]}]}'):
        path.write_text(text)
        table.forget()
        with pytest.raises(ValueError, match=r"x\.json is not a table of products"):
            table.lookup("x", Product(16, 1, 1))


def test_the_tool_measures_and_writes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    few = [Product(16, 128, 64), Product(16, 128, 64, swiglu=True)]
    monkeypatch.setattr(tune, "products_of", lambda *_: set(few))
    assert tune.main(["--interpret", "--configs", "1", "--sample", "0.001"]) == 0
    out = capsys.readouterr().out
    assert "2 products of a round on cpu" in out and "XLA" in out
    assert set(table.read(table.user_folder() / "cpu.json")) == set(few)
    assert tune.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert tune.main(["--interpret", "--shape", "none"]) == 1
    assert "--shape none: must be one of" in capsys.readouterr().err


def test_every_number_of_rows_has_a_place():
    found = [Product.of(rows, 1, 1, False).rows for rows in (1, 2, 16, 17, 32, 33, 64)]
    assert found == [1, 16, 16, 32, 32, 64, 64]
