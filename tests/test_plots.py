"""The pictures: what each shows is what it was given, and each has a title, units and a legend."""

import sys
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import SpineFirst, UserError, plots
from dflash_jax.tree import build_tree, chain_tree, walk


@pytest.fixture(scope="module")
def a_round():
    """A tree of 12 nodes whose walk takes the best child, then the second best, then leaves."""
    log_probs = jax.nn.log_softmax(3 * jax.random.normal(jax.random.key(1), (1, 5, 40)))
    tree = build_tree(jnp.array([7]), log_probs, 12, SpineFirst())
    parents, tokens = np.asarray(tree.parents[0]), np.asarray(tree.tokens[0])
    first = np.flatnonzero(parents == 0)[0]
    second = np.flatnonzero(parents == first)[1]
    chosen = np.full((1, 13), 39)
    chosen[0, 0], chosen[0, first] = tokens[first], tokens[second]
    walked = walk(tree, jnp.asarray(chosen))
    assert walked.count[0] == 3
    return SimpleNamespace(tree=tree, log_probs=np.asarray(log_probs[0]), path=[0, int(first), int(second)])


def texts(figure) -> list[str]:
    return [t.get_text() for axes in figure.axes for t in axes.texts]


def legend(figure) -> list[str]:
    return [t.get_text() for one in figure.legends for t in one.get_texts()]


def word(token: int) -> str:
    return f" w{token}"


def test_the_tree_has_every_node_and_the_accepted_path(a_round):
    tree = a_round.tree
    figure = plots.token_tree(tree, word, path=a_round.path, bonus=39)
    (axes,) = figure.axes
    nodes = [plots.show_token(word(int(t))) for t in tree.tokens[0]]
    assert sorted(texts(figure)) == sorted([*nodes, "␣w39"])
    edges = [t.get_bbox_patch().get_edgecolor()[:3] for t in axes.texts]
    outlined = [edge for edge in edges if edge == pytest.approx((213 / 255, 94 / 255, 0))]
    assert len(outlined) == 4  # anchor, two drafts, the bonus
    assert "12 nodes, 2 accepted" in axes.get_title() and "depth" in axes.get_xlabel()
    assert any("accepted" in label for label in legend(figure))
    # Every node stands at its depth, no two at one place, and an edge leads to it from its parent's place.
    places = [t.get_position() for t in axes.texts[:13]]
    assert [int(x) for x, _ in places] == np.asarray(tree.depths[0]).tolist()
    assert len(set(places)) == 13
    ends = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines]
    for row, parent in enumerate(np.asarray(tree.parents[0]).tolist()):
        assert parent < 0 or [places[parent], places[row]] in [[e[0], e[-1]] for e in ends]


def test_a_chain_is_one_line_and_padding_is_left_out():
    tree = chain_tree(jnp.array([1]), jnp.array([[2, 3, 4]]), jnp.array([[True, True, False]]))
    figure = plots.token_tree(tree, word, path=[0, 1])
    assert texts(figure) == ["␣w1", "␣w2", "␣w3"]
    assert {t.get_position()[1] for t in figure.axes[0].texts} == {0.0}
    narrow = plots.token_tree(tree, lambda token: ",", path=[0], bonus=3)
    assert {len(label) for label in texts(narrow)} == {3}  # room between a comma and its outline


def test_the_mask_shows_each_kind_of_entry(a_round):
    figure = plots.ancestor_mask(a_round.tree, path=a_round.path)
    shown = figure.axes[0].images[0].get_array()
    mask = np.asarray(a_round.tree.ancestors[0])
    np.testing.assert_array_equal(np.asarray(shown) > 0, mask)
    assert (np.asarray(shown) == 3).sum() == 6  # a path of three rows
    assert len(legend(figure)) == 4 and f"{mask.mean():.0%}" in figure.axes[0].get_title()
    assert len(legend(plots.ancestor_mask(a_round.tree))) == 3


def test_marginals_are_the_best_tokens_in_order(a_round):
    best = np.argsort(-a_round.log_probs, axis=1)
    figure = plots.marginals(a_round.log_probs, word, top=3, truth=[best[0, 0], best[1, 2], best[2, 9]])
    cells = texts(figure)
    assert len(cells) == 15
    for depth, rank in np.ndindex(5, 3):
        p = np.exp(a_round.log_probs[depth, best[depth, rank]])
        assert cells[3 * depth + rank].startswith(f"␣w{best[depth, rank]}")
        assert p < 0.005 or f"{100 * p:.0f}%" in cells[3 * depth + rank]
    assert "2 of 3" in legend(figure)[0]
    assert figure.axes[1].get_ylabel() == "probability"


def test_lines_carry_their_numbers():
    figure = plots.acceptance_by_depth({"dflash": [0.9, 0.8], "ddtree": [0.95, 0.9, 0.7]})
    assert [line.get_ydata().tolist() for line in figure.axes[0].lines] == [[0.9, 0.8], [0.95, 0.9, 0.7]]
    assert legend(figure) == ["dflash", "ddtree"]
    curves = [
        plots.Curve("H200", [1, 64], [10.0, 20.0], "predicted"),
        plots.Curve("H200", [1, 64], [11.0, 22.0], "measured"),
        plots.Curve("A100", [1, 64], [20.0, 21.0], "predicted"),
    ]
    figure = plots.round_times(curves)
    lines = figure.axes[0].lines
    assert [line.get_linestyle() for line in lines] == ["--", "-", "--"]
    assert lines[0].get_color() == lines[1].get_color() != lines[2].get_color()
    assert legend(figure) == ["H200, predicted", "H200, measured", "A100, predicted"]
    figure = plots.budget_sweep({1: 1.0, 64: 8.0}, curves)
    assert figure.axes[0].lines[0].get_ydata().tolist() == [1.0, 8.0]
    assert figure.axes[1].lines[0].get_ydata() == pytest.approx([1.0, 4.0])
    assert figure.axes[1].lines[2].get_ydata() == pytest.approx([1.0, 8 * 20 / 21])
    with pytest.raises(ValueError, match="A100: needs the time of 1 row"):
        plots.budget_sweep({1: 1.0, 16: 6.0}, curves[2:])


def test_a_training_curve_has_loss_and_tau():
    lines = [{"step": 20 * i, "loss_mean": 5.0 - i, "tau": 1.0 + i} for i in range(1, 4)]
    figure = plots.training_curve(lines)
    assert [axes.lines[0].get_ydata().tolist() for axes in figure.axes] == [[4.0, 3.0, 2.0], [2.0, 3.0, 4.0]]
    assert [axes.get_ylabel() for axes in figure.axes] == ["nats a token", "tokens a round"]
    figure = plots.training_curve(lines, heldout=[(0, 1.0), (60, 2.5)], reference=("shipped", 3.25))
    trained, heldout, mark = figure.axes[1].lines
    assert trained.get_ydata().tolist() == [2.0, 3.0, 4.0]
    assert heldout.get_xydata().tolist() == [[0, 1.0], [60, 2.5]]
    assert list(mark.get_ydata()) == [3.25, 3.25] and legend(figure)[-1] == "shipped: τ = 3.25"
    without = plots.training_curve([{"step": 1, "loss_mean": 2.0}])
    with pytest.raises(ValueError, match="no 'tau'"):
        plots.training_curve([{"step": 1, "loss_mean": 2.0}], heldout=[(1, 2.0)])
    assert len(without.axes) == 1
    with pytest.raises(ValueError, match="at least one"):
        plots.training_curve([])


POINTS = [
    {
        "method": method, "concurrency": clients, "rate": None, "tokens_per_second": 10.0 * clients,
        **{key: {"p50": 0.1 * clients, "p99": 0.2 * clients} for key in ("ttft_seconds", "itl_seconds")},
        "token_seconds": None if clients == 2 else {"p50": 0.05, "p99": 0.25},
    }
    for method in ("ar", "ddtree") for clients in (4, 1, 2)
]  # fmt: skip


def test_a_load_has_a_line_a_method():
    figure = plots.serving_load(POINTS, title="one machine")
    values = [[line.get_xydata().T.tolist() for line in axes.lines] for axes in figure.axes]
    loads = [1.0, 2.0, 4.0]
    assert values[0] == [[loads, [10.0, 20.0, 40.0]]] * 2
    assert values[1] == values[2]
    np.testing.assert_allclose(values[1], [[loads, [100, 200, 400]], [loads, [200, 400, 800]]] * 2)
    np.testing.assert_allclose(values[3], [[[1, 4], [50, 50]], [[1, 4], [250, 250]]] * 2)  # where it was measured
    assert legend(figure) == ["ar", "ar, p99", "ddtree", "ddtree, p99"]
    assert "tokens a second" in figure.axes[0].get_ylabel() and all("ms" in a.get_ylabel() for a in figure.axes[1:])
    assert figure.get_suptitle() == "one machine" and figure.axes[2].get_xlabel() == "requests at once"
    timed = plots.serving_load([point | {"rate": 2.5, "concurrency": None} for point in POINTS[:1]])
    assert "Poisson" in timed.axes[3].get_xlabel() and timed.axes[0].lines[0].get_xdata().tolist() == [2.5]
    with pytest.raises(ValueError, match="needs points"):
        plots.serving_load([])
    with pytest.raises(ValueError, match="all with rates"):
        plots.serving_load([*POINTS, POINTS[0] | {"rate": 1.0}])


def test_tokens_as_labels():
    shown = [plots.show_token(t) for t in (" a", "a\n", "", "$x$", "extraordinary")]
    assert shown == ["␣a", "a↵", "∅", "$x$", "extraord…"]


def test_every_figure_is_drawn_without_complaint(a_round, tmp_path):
    curves = [plots.Curve("x", [1, 16], [1.0, 2.0], "predicted")]
    figures = [
        plots.token_tree(a_round.tree, lambda t: "$\\frac{" if t % 2 else " \n", path=a_round.path, bonus=3),
        plots.ancestor_mask(a_round.tree, path=a_round.path),
        plots.marginals(a_round.log_probs, word),
        plots.acceptance_by_depth({"a": [0.5]}),
        plots.round_times(curves),
        plots.budget_sweep({1: 1.0, 16: 3.0}, curves),
        plots.training_curve([{"step": 1, "loss_mean": 2.0, "tau": 1.5}]),
        plots.serving_load(POINTS),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, figure in enumerate(figures):
            assert figure.axes[0].get_title() or figure.get_suptitle()
            assert any(axes.get_xlabel() for axes in figure.axes)
            assert all(axes.get_ylabel() for axes in figure.axes if axes.get_yticks().size)
            figure.savefig(tmp_path / f"{number}.png")
            assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="extra 'plots'"):
        plots.acceptance_by_depth({"a": [0.5]})
