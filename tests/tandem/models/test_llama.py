from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.cache.pool import KVPool
from tandem.errors import MissingTensor, ShapeMismatch, WeightsError
from tandem.models.llama import Llama
from tandem.models.model import Model, PrefillSequence, StepInputs
from tandem.models.registry import load_model
from tandem.ops.native import is_loaded
from tandem.testing.tiny import write_tiny_llama
from tandem.testing.variants import Tensors, add_biases, edit_config, edit_tensors
from tandem.weights.store import prepare

DATA = Path(__file__).parents[2] / "data"
GOLDEN = json.loads((DATA / "llama_logits.json").read_text())
SMOLLM2 = json.loads((DATA / "smollm2_reference.json").read_text())["cases"]
PAGE_TOKENS = 16
TOKEN_IDS = [(7 * i * i + 3 * i) % 256 for i in range(80)]


def load_tiny(folder: Path, **sizes: Any) -> Model:
    write_tiny_llama(folder, **sizes)
    return load_model(prepare(str(folder)), "float32")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


def make_pool(model: Model, num_pages: int = 32, page_tokens: int = PAGE_TOKENS) -> KVPool:
    pool = KVPool(model.spec.cache_groups(page_tokens, "float32"), num_pages)
    for name in ("k", "v"):
        pool[name].fill_(torch.nan)  # whatever is not written must not be read
    return pool


def no_layer(layer: int) -> None:
    pass


def prefill(
    model: Model,
    pool: KVPool,
    chunks: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    on_layer: Callable[[int], None] = no_layer,
) -> Tensor:
    """Logits of all (token ids, start, pages)."""
    sequences = [
        PrefillSequence(token_ids=ids, start=start, page_ids=pages, needs_logits=True)
        for ids, start, pages in chunks
    ]
    with torch.inference_mode():
        return model.prefill(sequences, pool, on_layer)


def decode(model: Model, pool: KVPool, token_id: int, position: int, pages: list[int]) -> Tensor:
    page_tokens = pool.groups[0].page_tokens
    page, offset = divmod(position, page_tokens)
    inputs = StepInputs(
        token_ids=torch.tensor([token_id]),
        positions=torch.tensor([position]),
        slots=torch.tensor([pages[page] * page_tokens + offset]),
        block_table=torch.tensor([pages], dtype=torch.int32),
        lengths=torch.tensor([position + 1], dtype=torch.int32),
    )
    with torch.inference_mode():
        return model.decode(inputs, pool)[0]


def same(actual: Tensor, expected: Tensor) -> None:
    """Native kernels promise equal bits, the references nearly so."""
    if is_loaded():
        assert torch.equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["name"]))
def test_logits_are_those_of_transformers(case: dict[str, Any], tmp_path: Path) -> None:
    sizes = {k: v for k, v in case.items() if k not in ("name", "biases", "rope_scaling", "logits")}
    write_tiny_llama(tmp_path, **sizes)
    if "rope_scaling" in case:
        edit_config(tmp_path, rope_scaling=case["rope_scaling"])
    if case.get("biases"):
        add_biases(tmp_path)
    model = load_model(prepare(str(tmp_path)), "float32")
    pages = list(range(1, 12))
    for shown, logits in case["logits"].items():
        token_ids = GOLDEN["token_ids"][: int(shown) + 1]
        expected = torch.tensor(logits)
        actual = prefill(model, make_pool(model), [(token_ids, 0, pages)])[0]
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)
        if len(token_ids) > 1:
            pool = make_pool(model)
            prefill(model, pool, [(token_ids[:-1], 0, pages)])
            stepped = decode(model, pool, token_ids[-1], len(token_ids) - 1, pages)
            torch.testing.assert_close(stepped, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48, 80])
def test_decode_continues_a_prompt_of_any_length(tiny: Model, length: int) -> None:
    pages = [9, 3, 17, 4, 21, 30]
    whole, stepped = make_pool(tiny), make_pool(tiny)
    prefill(tiny, stepped, [(TOKEN_IDS[:length], 0, pages)])
    token_ids = list(TOKEN_IDS[:length])
    for token_id in (5, 250, 17):
        logits = decode(tiny, stepped, token_id, len(token_ids), pages)
        token_ids.append(token_id)
        same(logits, prefill(tiny, whole, [(token_ids, 0, pages)])[0])
    for name in ("k", "v"):
        same(stepped[name].nan_to_num(), whole[name].nan_to_num())


@pytest.mark.parametrize("cuts", [[16], [32, 64], [1, 2, 3], [15, 16, 17], [31, 47, 79], [40]])
def test_chunks_compute_what_one_pass_does(tiny: Model, cuts: list[int]) -> None:
    pages = [9, 3, 17, 4, 21]
    whole, chunked = make_pool(tiny), make_pool(tiny)
    expected = prefill(tiny, whole, [(TOKEN_IDS, 0, pages)])
    for start, end in zip([0, *cuts], [*cuts, len(TOKEN_IDS)], strict=True):
        logits = prefill(tiny, chunked, [(TOKEN_IDS[start:end], start, pages)])
    same(logits, expected)
    for name in ("k", "v"):
        same(chunked[name].nan_to_num(), whole[name].nan_to_num())


def test_sequences_in_one_batch_do_not_touch_one_another(tiny: Model) -> None:
    long, short, other = TOKEN_IDS, TOKEN_IDS[3:4], TOKEN_IDS[10:50]
    pool = make_pool(tiny)
    prefill(tiny, pool, [(long[:32], 0, [1, 2])])  # a prefix in the cache, shared below
    chunks: list[tuple[list[int], int, list[int]]] = [
        (long[32:], 32, [1, 2, 3, 4, 5]),
        (short, 0, [6]),
        (other, 0, [7, 8, 9]),
        (long[32:48], 32, [1, 2, 10]),
    ]
    together = prefill(tiny, pool, chunks)
    alone = [
        prefill(tiny, make_pool(tiny), [(ids, 0, [1, 2, 3, 4, 5])])[0]
        for ids in (long, short, other, long[:48])
    ]
    same(together, torch.stack(alone))


def test_only_wanted_logits_come_back_in_order(tiny: Model) -> None:
    sequences = [
        PrefillSequence(token_ids=TOKEN_IDS[:n], start=0, page_ids=[n], needs_logits=n != 5)
        for n in (3, 5, 7)
    ]
    with torch.inference_mode():
        some = tiny.prefill(sequences, make_pool(tiny), no_layer)
        none = tiny.prefill(sequences[1:2], make_pool(tiny), no_layer)
    assert none.shape == (0, tiny.spec.vocab_size)
    for row, n in enumerate((3, 7)):
        same(some[row], prefill(tiny, make_pool(tiny), [(TOKEN_IDS[:n], 0, [1])])[0])


def test_a_layer_is_in_the_pool_when_it_is_announced(tiny: Model) -> None:
    pool, final = make_pool(tiny), make_pool(tiny)
    prefill(tiny, final, [(TOKEN_IDS[:20], 0, [4, 2])])
    seen = []

    def on_layer(layer: int) -> None:
        seen.append(layer)
        for name in ("k", "v"):
            same(pool[name][: layer + 1].nan_to_num(), final[name][: layer + 1].nan_to_num())
            assert pool[name][layer + 1 :].isnan().all()

    prefill(tiny, pool, [(TOKEN_IDS[:20], 0, [4, 2])], on_layer)
    assert seen == [0, 1]


def test_what_on_layer_raises_ends_the_prefill(tiny: Model) -> None:
    seen = []

    def on_layer(layer: int) -> None:
        seen.append(layer)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        prefill(tiny, make_pool(tiny), [(TOKEN_IDS[:20], 0, [4, 2])], on_layer)
    assert seen == [0]


def test_page_size_does_not_change_results(tiny: Model) -> None:
    expected = prefill(tiny, make_pool(tiny), [(TOKEN_IDS, 0, list(range(1, 6)))])
    for page_tokens in (1, 7, 128):
        pool = make_pool(tiny, num_pages=90, page_tokens=page_tokens)
        same(prefill(tiny, pool, [(TOKEN_IDS, 0, list(range(1, 90)))]), expected)


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    folder = prepare(str(tmp_path))
    exact = load_model(folder, "float32")
    expected = prefill(exact, make_pool(exact), [(TOKEN_IDS, 0, list(range(1, 6)))])[0]
    model = load_model(folder, "bfloat16")
    pool = KVPool(model.spec.cache_groups(PAGE_TOKENS, "bfloat16"), 8)
    actual = prefill(model, pool, [(TOKEN_IDS, 0, list(range(1, 6)))])[0]
    assert actual.dtype == torch.float32
    assert (actual - expected).std() < 0.02 * expected.std()


def test_float32_weights_stay_in_the_file(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, tie_embeddings=True)
    model = load_model(prepare(str(tmp_path)), "auto")
    assert isinstance(model, Llama)
    assert model.weights.head is model.weights.embedding
    mapped = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(tmp_path / "model.safetensors"))
    ]
    for layer in model.weights.layers:
        at = layer.gate.weight.data_ptr()
        assert any(start <= at < end for start, end in mapped)


def remove_norm(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]


def cut_gate(tensors: Tensors) -> None:
    name = "model.layers.1.mlp.gate_proj.weight"
    tensors[name] = tensors[name][:-1]


def add_stranger(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_norm.weight"] = tensors["model.norm.weight"]


@pytest.mark.parametrize(
    ("change", "error", "name"),
    [
        (remove_norm, MissingTensor, "model.norm.weight"),
        (cut_gate, ShapeMismatch, "model.layers.1.mlp.gate_proj.weight"),
        (add_stranger, WeightsError, "q_norm"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, change: Callable[[Tensors], None], error: type[WeightsError], name: str
) -> None:
    write_tiny_llama(tmp_path)
    edit_tensors(tmp_path, change)
    with pytest.raises(error, match=name):
        load_model(prepare(str(tmp_path)), "float32")


def test_a_spare_head_of_a_tied_model_is_ignored(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)  # with a head
    edit_config(tmp_path, tie_word_embeddings=True)
    model = load_model(prepare(str(tmp_path)), "float32")
    assert isinstance(model, Llama)
    assert model.weights.head is model.weights.embedding


@pytest.mark.weights
@pytest.mark.parametrize("case", SMOLLM2, ids=lambda case: str(case["prompt"])[:20])
def test_smollm2_agrees_with_transformers_wherever_it_is_sure(case: dict[str, Any]) -> None:
    model = load_model(prepare("smollm2"), "float32")
    pool, pages = make_pool(model), list(range(1, 20))
    token_ids = case["prompt_ids"]
    logits = prefill(model, pool, [(token_ids, 0, pages)])[0]
    steps = zip(case["output_ids"], case["margins"], strict=True)
    for index, (token_id, margin) in enumerate(steps):
        best, second = logits.topk(2).values.tolist()
        assert best - second == pytest.approx(margin, abs=0.01)
        if margin > 0.25:
            assert int(logits.argmax()) == token_id
        logits = decode(model, pool, token_id, len(token_ids) + index, pages)
