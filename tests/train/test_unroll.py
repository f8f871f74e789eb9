"""The second place that shifts, and the attention that serves it: fast against naive, packed against alone, some rows against all rows.

Legend: T positions, R rows, D hidden width, H query heads, G key-value heads, d head width, Vd draft vocabulary, K steps, k step.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from draft_helpers import EMBEDDING, WIDTH, assert_same_gradients, gradients, random_draft, random_head, random_ids, random_row, relative_error, small_shape

from eyas.draft.attention import Document, cached_attention, unrolled_attention
from eyas.draft.model import Draft, DraftCache
from eyas.features.shard import FeatureRow
from eyas.train.batch import make_batch
from eyas.train.loss import Objective, Teacher, loss_backward
from eyas.train.unroll import unroll

K = 4
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYERS = [(1, False), (1, True), (2, False), (3, True)]  # decoder layers, q/k norms


def real_steps(draft: Draft, embedding: torch.Tensor, row: FeatureRow, i: int, num_steps: int) -> list[torch.Tensor]:
    """What the head reads [D] at each of `num_steps` draft steps begun at position i, as an engine makes them: prefill, then one token at a time."""
    tokens = row.tokens.long()
    read: list[torch.Tensor] = []
    hook = draft.lm_head.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0][-1]))
    cache = DraftCache()
    _, hidden = draft(embedding[tokens[1 : i + 2]], draft.fuse(row.aux[: i + 1]), torch.arange(i + 1), cache)
    for k in range(1, num_steps):
        _, hidden = draft(embedding[tokens[i + 1 + k]][None], hidden[-1:], torch.tensor([i + k]), cache)
    hook.remove()
    return read


@pytest.mark.parametrize("heads", [(4, 2, 6), (4, 4, 6), (4, 1, 4), (2, 2, 8)], ids=lambda heads: "x".join(map(str, heads)))
@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=4)), ids=lambda flags: "".join("01"[flag] for flag in flags))
@pytest.mark.parametrize(("layers", "qk_norm"), LAYERS)
def test_unrolled_steps_equal_real_draft_steps_started_at_each_row(flags: tuple[bool, ...], heads: tuple[int, int, int], layers: int, qk_norm: bool) -> None:
    shape = small_shape(
        num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=heads[2], num_hidden_layers=layers, qk_norm=qk_norm,
        **dict(zip(FLAGS, flags, strict=True)),
    )  # fmt: skip
    draft, embedding, row = random_draft(shape), EMBEDDING, random_row("..ssssss.sss")
    batch = make_batch([row], EMBEDDING, K, torch.float32)
    found, wanted = [], []
    steps = unroll(draft, batch, K)
    for r, (i, num_steps) in enumerate(zip(batch.rows_R.tolist(), batch.num_steps_R.tolist(), strict=True)):
        assert [bool(step.counts_R[r]) for step in steps] == [k < num_steps for k in range(K)]
        assert [int(step.at_R[r]) for step in steps[:num_steps]] == [i + k for k in range(num_steps)]
        found += [step.hidden_RD[r] for step in steps[:num_steps]]
        wanted += real_steps(draft, embedding, row, i, num_steps)
    fast, naive = torch.stack(found), torch.stack(wanted)
    assert relative_error(fast, naive) < 1e-5
    weights = torch.randn(fast.shape, generator=torch.Generator().manual_seed(5))
    (fast * weights).sum().backward()
    from_unroll = gradients(draft)
    (naive * weights).sum().backward()
    assert_same_gradients(from_unroll, gradients(draft), 2e-5 * layers)  # both round in float32, layer upon layer


def test_a_later_step_reads_the_true_token_and_not_the_next_but_one() -> None:
    """Were the comparison above blind to a shift, a shifted loop would pass too; it must not."""
    draft, embedding, row = random_draft(small_shape()), EMBEDDING, random_row(".ssssss")
    shifted = replace(row, tokens=row.tokens.roll(-1))
    batch = make_batch([row], EMBEDDING, 2, torch.float32)
    steps = unroll(draft, batch, 2)
    for k in range(2):
        assert relative_error(steps[k].hidden_RD[1], real_steps(draft, embedding, row, 1, 2)[k]) < 1e-5
        assert relative_error(steps[k].hidden_RD[1], real_steps(draft, embedding, shifted, 1, 2)[k]) > 1e-2


def loss_of(draft: Draft, rows: list[FeatureRow], denominator: float, num_steps: int = K) -> torch.Tensor:
    head = random_head()
    batch = make_batch(rows, EMBEDDING, num_steps, torch.float32)
    teacher = Teacher(head, random_ids(), torch.float32, torch.device("cpu"))
    return loss_backward(unroll(draft, batch, num_steps), draft.lm_head, teacher, batch, Objective(0.8, denominator))[0]


def test_packed_documents_equal_the_same_documents_alone() -> None:
    draft = random_draft(small_shape())
    rows = [random_row(mask, seed) for seed, mask in enumerate([".ssss.sss", "s", "...", ".ss", "ssssssssss", "..s"], start=10)]
    packed = make_batch(rows, EMBEDDING, K, torch.float32)
    steps = unroll(draft, packed, K)
    for doc, row in zip(packed.documents, rows, strict=True):
        if doc.row_start == doc.row_end:
            continue
        for step, alone in zip(steps, unroll(draft, make_batch([row], EMBEDDING, K, torch.float32), K), strict=True):
            here = step.hidden_RD[doc.row_start : doc.row_end]
            assert torch.equal(step.counts_R[doc.row_start : doc.row_end], alone.counts_R)
            assert relative_error(here[alone.counts_R], alone.hidden_RD[alone.counts_R]) < 1e-5
    denominator = float(len(packed.rows_R))
    loss = loss_of(draft, rows, denominator)
    from_pack = gradients(draft)
    losses = [loss_of(draft, [row], denominator) for row, doc in zip(rows, packed.documents, strict=True) if doc.row_start < doc.row_end]
    assert relative_error(loss, torch.stack(losses).sum()) < 1e-5
    assert_same_gradients(from_pack, gradients(draft), 1e-5)


def test_nothing_in_one_document_moves_the_outputs_or_gradients_of_another() -> None:
    draft = random_draft(small_shape())
    second = random_row(".ssssss", 21)
    outputs, grads = [], []
    for seed in (22, 23):
        batch = make_batch([random_row(".sssss", seed), second, random_row("sss", seed + 10)], EMBEDDING, K, torch.float32)
        batch.aux.requires_grad_()
        doc = batch.documents[1]
        steps = unroll(draft, batch, K)
        here = torch.stack([step.hidden_RD[doc.row_start : doc.row_end] for step in steps])
        counts = torch.stack([step.counts_R[doc.row_start : doc.row_end] for step in steps])
        outputs.append(here[counts])
        here[counts].square().sum().backward()
        outside = torch.cat((batch.aux.grad[: doc.start], batch.aux.grad[doc.end :]))
        assert not outside.any()
        grads.append(gradients(draft))
    assert relative_error(outputs[0], outputs[1]) < 1e-6
    assert_same_gradients(grads[0], grads[1], 1e-5)


def test_a_row_sees_no_position_behind_its_own() -> None:
    draft, row = random_draft(small_shape()), random_row(".sssssssss")
    batch = make_batch([row], EMBEDDING, K, torch.float32)
    batch.aux.requires_grad_()
    for r, i in enumerate(batch.rows_R.tolist()):
        steps = unroll(draft, batch, K)  # a backward uses up what the MLP has kept
        sum(step.hidden_RD[r].square().sum() for step in steps if step.counts_R[r]).backward()
        assert not batch.aux.grad[i + 1 :].any()
        assert batch.aux.grad[: i + 1].any(dim=(1, 2)).all()
        batch.aux.grad = None


# --- every position, every logit, masked afterwards -------------------------------------------------------------------------------------------


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x_THd: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary positions as complex numbers: pair (j, j + d/2) turns by position * theta**(-2j/d)."""
    half = x_THd.shape[-1] // 2
    angle = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
    pairs = torch.complex(x_THd[..., :half].double(), x_THd[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def naive_loss(draft: Draft, rows: list[FeatureRow], denominator: float, num_steps: int) -> torch.Tensor:
    """The whole training loss in float64, from the definition: a dense softmax, all positions, the full target vocabulary, masks at the end."""
    shape, head, ids = draft.shape, random_head(), random_ids()
    w = {name: parameter.double() for name, parameter in draft.named_parameters()}
    eps, theta, repeat = shape.rms_norm_eps, shape.rope_parameters["rope_theta"], shape.num_attention_heads // shape.num_key_value_heads
    embedding = head.embedding.double()
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        length = len(row.tokens)
        tokens = torch.cat((row.tokens.long(), torch.zeros(num_steps + 2, dtype=torch.long)))
        aux = row.aux.double().flatten(1)
        if shape.norm_before_fc:
            aux = rms(aux, w["input_norm.weight"], eps)
        if shape.fc_norm:
            aux = torch.cat([rms(part, w[f"fc_norm.{n}.weight"], eps) for n, part in enumerate(aux.chunk(3, -1))], -1)
        hidden = aux @ w["fc.weight"].T
        last = torch.cat((row.last.double(), torch.zeros(num_steps + 1, row.last.shape[1])))
        target_logits = rms(last, head.norm_weight.double(), head.norm_eps) @ head.head.double().T
        keys: list[list[torch.Tensor]] = [[] for _ in range(shape.num_hidden_layers)]
        values: list[list[torch.Tensor]] = [[] for _ in range(shape.num_hidden_layers)]
        for k in range(num_steps):
            position = torch.arange(length)
            normed = rms(hidden, w["midlayer.hidden_norm.weight"], eps)
            x = torch.cat((rms(embedding[tokens[position + 1 + k]], w["midlayer.input_layernorm.weight"], eps), normed), -1)
            stream = normed if shape.norm_before_residual else hidden
            for number in range(shape.num_hidden_layers):
                name = f"layers.{number}" if number else "midlayer"
                if number:
                    x = rms(stream, w[f"{name}.input_layernorm.weight"], eps)
                q, key, value = (
                    (x @ w[f"{name}.self_attn.{letter}_proj.weight"].T).view(length, count, shape.head_dim)
                    for letter, count in (("q", shape.num_attention_heads), ("k", shape.num_key_value_heads), ("v", shape.num_key_value_heads))
                )
                if shape.qk_norm:
                    q, key = rms(q, w[f"{name}.self_attn.q_norm.weight"], eps), rms(key, w[f"{name}.self_attn.k_norm.weight"], eps)
                q = turned(q, position + k, theta)
                keys[number].append(turned(key, position + k, theta).repeat_interleave(repeat, 1))
                values[number].append(value.repeat_interleave(repeat, 1))
                scores = torch.einsum("ihd,jhd->ihj", q, keys[number][0]).masked_fill(position[None, None] > position[:, None, None], -torch.inf)
                own = [(q * own_key).sum(-1, keepdim=True) for own_key in keys[number][1:]]
                weights = (torch.cat((scores, *own), -1) / shape.head_dim**0.5).softmax(-1)
                mixed = torch.einsum("ihj,jhd->ihd", weights[..., :length], values[number][0])
                for n, own_value in enumerate(values[number][1:]):
                    mixed = mixed + weights[..., length + n, None] * own_value
                stream = stream + mixed.flatten(1) @ w[f"{name}.self_attn.o_proj.weight"].T
                y = rms(stream, w[f"{name}.post_attention_layernorm.weight"], eps)
                gate, up = y @ w[f"{name}.mlp.gate_proj.weight"].T, y @ w[f"{name}.mlp.up_proj.weight"].T
                stream = stream + (gate * gate.sigmoid() * up) @ w[f"{name}.mlp.down_proj.weight"].T
            output = rms(stream, w["norm.weight"], eps)
            hidden = output if shape.norm_output else stream
            teacher = target_logits[position + 1 + k].softmax(-1)[:, ids]
            teacher = teacher / teacher.sum(-1, keepdim=True)  # mass outside the draft vocabulary: renormalised
            cross_entropy = -(teacher * (output @ w["lm_head.weight"].T).log_softmax(-1)).sum(-1)
            for i in range(length):
                needed = range(i + 1, i + 3 + k)
                if needed[-1] < length and all(bool(row.supervised[j]) for j in needed):
                    total = total + 0.8**k * cross_entropy[i] / denominator
    return total


@pytest.mark.parametrize("flags", [(True, False, True, True), (False, False, False, False), (False, True, True, False), (True, True, False, True)])
@pytest.mark.parametrize("heads", [(4, 2, 6), (4, 4, 4)])
@pytest.mark.parametrize(("layers", "qk_norm"), LAYERS)
def test_computing_supervised_rows_alone_equals_computing_all_rows_and_masking(
    flags: tuple[bool, ...], heads: tuple[int, int, int], layers: int, qk_norm: bool
) -> None:
    shape = small_shape(
        num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=heads[2], num_hidden_layers=layers, qk_norm=qk_norm,
        **dict(zip(FLAGS, flags, strict=True)),
    )  # fmt: skip
    draft = random_draft(shape)
    rows = [random_row(mask, seed) for seed, mask in enumerate(["....sssss..sss.s", "ss", ".", "sssssss", "......"], start=30)]
    loss = loss_of(draft, rows, 11.0)
    fast = gradients(draft)
    naive = naive_loss(draft, rows, 11.0, K)
    naive.backward()
    assert relative_error(loss, naive) < 1e-5
    assert_same_gradients(fast, gradients(draft), 2e-5)
    assert all(gradient.any() for gradient in fast.values()), "a parameter that nothing reaches proves nothing"


# --- the attention alone ------------------------------------------------------------------------------------------------------------------------


def naive_attention(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own_keys: list[torch.Tensor],
    own_values: list[torch.Tensor],
    rows: list[int],
    documents: list[Document],
) -> torch.Tensor:
    """float64, one row and one head at a time."""
    repeat = q.shape[1] // key.shape[1]
    out = []
    for doc in documents:
        for r in range(doc.row_start, doc.row_end):
            heads = []
            for h in range(q.shape[1]):
                g = h // repeat
                seen = range(doc.start, rows[r] + 1)
                the_keys = [key[j, g] for j in seen] + [own[r, g] for own in own_keys]
                the_values = [value[j, g] for j in seen] + [own[r, g] for own in own_values]
                weights = torch.stack([(q[r, h] * one).sum() / q.shape[2] ** 0.5 for one in the_keys]).exp()
                heads.append(sum(weight * one for weight, one in zip(weights / weights.sum(), the_values, strict=True)))
            out.append(torch.stack(heads))
    return torch.stack(out)


@pytest.mark.parametrize("heads", [(4, 2, 6), (3, 3, 4), (6, 1, 2)])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_unrolled_attention_equals_explicit_loops_in_float64(heads: tuple[int, int, int], k: int) -> None:
    H, G, d = heads
    documents = [Document(0, 5, 0, 2), Document(5, 6, 2, 2), Document(6, 13, 2, 6), Document(13, 14, 6, 7)]
    rows = [1, 3, 6, 8, 9, 12, 13]
    generator = torch.Generator().manual_seed(k)

    def leaf(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).mul(1.5).requires_grad_()

    q, key, value = leaf(7, H, d), leaf(14, G, d), leaf(14, G, d)
    own_keys, own_values = [leaf(7, G, d) for _ in range(k)], [leaf(7, G, d) for _ in range(k)]
    lengths = [doc.end - doc.start for doc in documents]
    fast = unrolled_attention(q, key.split(lengths), value.split(lengths), own_keys, own_values, torch.tensor(rows), documents)
    inputs = [q, key, value, *own_keys, *own_values]
    upstream = torch.randn(fast.shape, generator=generator)
    fast_gradients = torch.autograd.grad((fast * upstream).sum(), inputs)
    q64, key64, value64, *own64 = (tensor.detach().double().requires_grad_() for tensor in inputs)
    slow = naive_attention(q64, key64, value64, own64[:k], own64[k:], rows, documents)
    slow_gradients = torch.autograd.grad((slow * upstream.double()).sum(), [q64, key64, value64, *own64])
    assert relative_error(fast, slow) < 1e-5
    for found, wanted in zip(fast_gradients, slow_gradients, strict=True):
        assert relative_error(found, wanted) < 1e-5


@pytest.mark.parametrize("num_new", [1, 3, 8])
def test_cached_attention_is_causal_over_what_is_cached_and_new(num_new: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, key, value = torch.randn(num_new, 4, 6, generator=generator), torch.randn(8, 2, 6, generator=generator), torch.randn(8, 2, 6, generator=generator)
    wanted = naive_attention(q.double(), key.double(), value.double(), [], [], list(range(8 - num_new, 8)), [Document(0, 8, 0, num_new)])
    assert relative_error(cached_attention(q, key, value), wanted) < 1e-5


def test_recomputing_in_backward_changes_no_bit() -> None:
    rows = [random_row(mask, seed) for seed, mask in enumerate([".ssss.sss", "s", "...", ".ss", "ssssssssss", "..s"], start=70)]
    batch = make_batch(rows, EMBEDDING, K, torch.float32)
    draft, weights = random_draft(small_shape(num_hidden_layers=2)), torch.randn(K, len(batch.rows_R), WIDTH)
    found, grads = [], []
    for recompute in (False, True):
        hidden = torch.stack([step.hidden_RD for step in unroll(draft, batch, K, recompute)])
        (hidden * weights).sum().backward()
        found.append(hidden)
        grads.append(gradients(draft))
    assert torch.equal(*found)
    assert_same_gradients(*grads, 0.0)


# --- in bfloat16, and on a GPU by other kernels -------------------------------------------------------------------------------------------------

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")])]
# One token alone, nothing supervised, spans at both ends, spans shorter than K, all supervised.
ODD_MASKS = ["s", "......", "sss....ss", ".ss.s", "." * 130 + "s" * 61, "s" * 75]
ODD_SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads of 64": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "full heads of 80, three layers": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 80, "num_hidden_layers": 3},
    "heads of 128, norms over them, two layers": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "num_hidden_layers": 2, "qk_norm": True},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ODD_SHAPES)
@pytest.mark.parametrize(("products", "loss_off", "off_by"), [("bfloat16", 0.01, 0.05), ("float8", 0.02, 0.2)])
def test_in_few_bits_loss_and_gradients_are_near_those_of_the_definition(name: str, device: str, products: str, loss_off: float, off_by: float) -> None:
    """The definition in float64 over the same weights and features. Tolerance: bfloat16 rounds each number to 8 bits, 0.4%, float8 to 4, 6%; several products
    add up, and of many numbers the roundings cancel."""
    draft = random_draft(small_shape(**ODD_SHAPES[name]))
    with torch.no_grad():
        for parameter in draft.parameters():
            # Smaller than elsewhere: scores of 20 and more would make of each rounding a tenth of a weight in the softmax.
            parameter.copy_((parameter * (0.4 if parameter.dim() > 1 else 1.0)).bfloat16())
    rows = [random_row(mask, seed) for seed, mask in enumerate(ODD_MASKS, start=80)]
    rows = [replace(row, aux=row.aux.bfloat16().float(), last=row.last.bfloat16().float()) for row in rows]
    naive = naive_loss(draft, rows, 150.0, K)
    naive.backward()
    wanted = gradients(draft)

    draft.to(device)
    head, batch = random_head(), make_batch(rows, EMBEDDING, K, torch.bfloat16, 128, 64).to(torch.device(device))
    teacher = Teacher(head, random_ids(), torch.bfloat16, torch.device(device))
    if products == "float8":
        draft.multiply_in_float8()
    steps = unroll(draft, batch, K)
    loss, _ = loss_backward(steps, draft.lm_head, teacher, batch, Objective(0.8, 150.0))
    found = gradients(draft)
    assert abs(loss.item() - naive.item()) < loss_off * naive.item()
    off = {key: float((found[key].cpu().double() - wanted[key].double()).norm() / wanted[key].double().norm()) for key in wanted}
    assert max(off.values()) < off_by, off
    assert products == "bfloat16" or max(off.values()) > 0.05, "some product was made in float8"
