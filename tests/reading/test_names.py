"""Rules for names: what users give, and what becomes of tensors and leaves."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hf_cases import CASES
from hf_record import RECORD, flatten
from ostraka.errors import Mismatch
from ostraka.families import families
from ostraka.reading.names.given import read_names
from ostraka.reading.names.rules import Composition, match

Shapes = dict[str, tuple[int, ...]]


def shapes_of(leaves: list[Composition]) -> Shapes:
    return {leaf.path: leaf.shape for leaf in leaves}


# What users give


@pytest.mark.parametrize(
    ("rules", "tensors", "leaves"),
    [
        ({"model.norm.weight": "norm/scale"}, {"model.norm.weight": (8,)}, {"norm/scale": (8,)}),
        (
            {"m.{n}.q.weight": {"path": "layers/{n}/q/kernel", "transpose": True}},
            {"m.0.q.weight": (6, 4), "m.10.q.weight": (6, 4)},
            {"layers/0/q/kernel": (4, 6), "layers/10/q/kernel": (4, 6)},
        ),
        (
            {"net.{rest*}": "model/{rest*}"},
            {"net.a.0.w": (2,), "net.b": (3,)},
            {"model/a/0/w": (2,), "model/b": (3,)},
        ),
        (
            {"a.special": "s", "a.{x}": "others/{x}"},  # the first that matches decides
            {"a.special": (1,), "a.b": (2,)},
            {"s": (1,), "others/b": (2,)},
        ),
        (  # a repeated placeholder stands for the same
            {"l.{n}.b{n}": "l/{n}", "{rest*}": "other/{rest*}"},
            {"l.1.b1": (1,), "l.1.b2": (2,), "l.2.b2": (3,)},
            {"l/1": (1,), "other/l/1/b2": (2,), "l/2": (3,)},
        ),
    ],
)
def test_rules_there_and_back(rules: Any, tensors: Shapes, leaves: Shapes):
    names = read_names(rules)
    assert shapes_of(names.compose(tensors)) == leaves
    again = names.decompose(leaves)
    assert {name: leaf.form.shape_before for leaf in again for name in leaf.tensors} == tensors


def test_stacks_of_several_placeholders():
    """Layers that are scanned over, with experts in them."""
    rule = {"path": "layers/experts/kernel", "transpose": True, "stack": ["n", "e"]}
    names = read_names({"l.{n}.e.{e}.w": rule})
    tensors = {f"l.{n}.e.{e}.w": (6, 4) for e in (2, 0, 1) for n in range(2)}
    (leaf,) = names.compose(tensors)
    assert leaf.shape == (2, 3, 4, 6)
    assert leaf.tensors[:4] == ("l.0.e.0.w", "l.0.e.1.w", "l.0.e.2.w", "l.1.e.0.w")
    (again,) = names.decompose({"layers/experts/kernel": (2, 3, 4, 6)})
    assert again == leaf


def test_a_file_of_rules(tmp_path: Path):
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"w": {"path": "kernel", "split": {"0": [2, -1]}}, "b": None}))
    for given in (str(path), path):
        assert shapes_of(read_names(given).compose({"w": (6,), "b": (1,)})) == {"kernel": (2, 3)}


def test_a_function():
    def names(name: str, shape: tuple[int, ...]) -> Any:
        if name.endswith("num_batches"):
            return None
        path = name.replace(".", "/")
        if len(shape) == 2:
            return {"path": path.replace("weight", "kernel"), "transpose": True}
        return path

    tensors = {"a.weight": (2, 3), "a.bias": (2,), "a.num_batches": ()}
    found = shapes_of(read_names(names).compose(tensors))
    assert found == {"a/kernel": (3, 2), "a/bias": (2,)}


def test_a_function_that_stacks_and_one_that_writes():
    def stack(name: str, shape: tuple[int, ...]) -> Any:
        return {"path": "all", "transpose": True, "stack": int(name)}

    (leaf,) = read_names(stack).compose({"1": (2, 3), "0": (2, 3)})
    assert (leaf.tensors, leaf.shape) == (("0", "1"), (2, 3, 2))

    def name(path: str, shape: tuple[int, ...]) -> Any:
        return {"path": path.replace("/", "."), "transpose": True}

    (tensor,) = read_names(name).decompose({"a/kernel": (2, 3)})
    assert (tensor.path, tensor.shape, tensor.tensors, tensor.form.shape_before) == (
        "a/kernel",
        (2, 3),
        ("a.kernel",),
        (3, 2),
    )
    with pytest.raises(Mismatch, match="rules can't stack leaves into 'all'; give each leaf a ten"):
        read_names(stack).decompose({"1": (2, 3), "0": (2, 3)})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("lama", "names='lama' is neither a family (did you mean 'llama'?) nor a file of rules"),
        ("hf", "names='hf' needs the model_type of a config.json, and there is none"),
        (7, "names= takes 'hf', the name of a family, rules, the path of a JSON file"),
        ({}, "names= has no rules"),
        ([], "not list"),
        (["llama", {"a": "b"}], "and at its end one family or 'hf'"),
        ([lambda name, shape: name, "llama"], "a function alone, not in a list"),
        ({"": "x"}, "names= has a rule for '', which is no name of a tensor"),
        (
            {"w": 3},
            "the rule for 'w': it must be a path, a mapping with a path or a cut, or None, not 3",
        ),
        ({"w": {"transposed": True}}, "it has 'transposed' (did you mean 'transpose'?)"),
        ({"w": {"transpose": True}}, "its path must be one such as 'layers/{n}/kernel', not None"),
        ({"w": "/a"}, "its path must be one such as 'layers/{n}/kernel', not '/a'"),
        ({"w": {"path": "a", "transpose": "yes"}}, "transpose must be true, false, or the order"),
        ({"w": {"path": "a", "split": [2]}}, "split must be such as {1: [8, -1]}, not [2]"),
        ({"w": {"path": "a", "split": {0: [-1, -1]}}}, "sizes of which one may be -1"),
        ({"w.{n}": "a"}, "{n} is not in the path: a part of a name goes into the path"),
        ({"w": "a/{n}"}, "the path has {n}, which the name has not"),
        ({"w.{n}": {"path": "a/{n}", "stack": "n"}}, "{n} is both in the path and in stack"),
        ({"w.{n}": {"path": "a", "stack": "e"}}, "stack has 'e', which must be placeholders"),
    ],
)
def test_what_can_not_be_understood(names: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_names(names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "it has no JSON object at its top"),
        ('{"a": "b", "a": "c"}', "it has 'a' twice"),
        ('{"w": {"cut": {"axis": 0, "into": {"a": 1, "a": 2}}}}', "it has 'a' twice"),
        ("{", "can't be read as rules"),
        ("[" * 100_000, "can't be read as rules"),
    ],
)
def test_a_file_that_has_no_rules(tmp_path: Path, text: str, message: str):
    path = tmp_path / "rules.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_names(path)
    with pytest.raises(ValueError, match="it is no file of at most"):
        read_names(tmp_path)


# What does not correspond


@pytest.mark.parametrize(
    ("rules", "tensors", "message"),
    [
        (
            {"a": "x"},
            {"a": (1,), "b": (1,), "c": (1,), "d": (1,), "e": (1,)},
            "no rule names 4 tensors ('b', 'c', 'd' and 1 more): give one, or None to leave out",
        ),
        ({"a": "x", "bb": "y"}, {"a": (1,)}, "the rule for 'bb' matches no tensor that is left"),
        (
            {"a.{n}": "x/{n}"},
            {"b.0": (1,), "b.1": (1,)},
            "no rule names any tensor, such as 'b.0', 'b.1'; the first is for 'a.{n}'",
        ),
        ({"a": "x", "b": "x"}, {"a": (1,), "b": (1,)}, "tensors 'a', 'b' would all be leaf 'x'"),
        ({"a": "x", "b": "x/y"}, {"a": (1,), "b": (1,)}, "'x' would be a leaf, and hold the leaf"),
        (
            {"w.{n}": {"path": "w", "stack": "n"}},
            {"w.0": (1,), "w.2": (1,)},
            "stacked of 2 tensors, such as 'w.0', and there is none with the number 1",
        ),
        (
            {"w.{n}": {"path": "w", "stack": "n"}},
            {"w.0": (1,), "w.00": (1,)},
            "tensors 'w.0', 'w.00' would be the same part of leaf 'w'",
        ),
        (
            {"w.{n}": {"path": "w", "stack": "n"}},
            {"w.0": (1,), "w.1": (2,)},
            "'w.0' has the shape (1,), 'w.1' has (2,)",
        ),
        ({"w.{n}": {"path": "w", "stack": "n"}}, {"w.x": (1,)}, "by 'x', which is no number"),
        (
            {"w": {"path": "w", "transpose": [1, 0]}},
            {"w": (2,)},
            "tensor 'w' has 1 axes, which can't be put in the order [1, 0]",
        ),
    ],
)
def test_what_does_not_correspond_is_named(rules: Any, tensors: Any, message: str):
    with pytest.raises(Mismatch, match=re.escape(message)):
        read_names(rules).compose(tensors)


def test_likely_causes_come_first():
    lora = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (8, 4)}
    with pytest.raises(Mismatch, match="it is a LoRA adapter, not a whole model") as caught:
        read_names("llama").compose(lora)
    assert "LoRA" in caught.value.differences[0]


def test_leaves_that_no_rule_names():
    with pytest.raises(Mismatch, match=r"no rule names 1 leaf \('step'\): give one"):
        read_names("llama").decompose({"norm/scale": (8,), "step": ()})
    names = read_names({"t": {"path": "w", "merge": {0: [2, -1]}}})
    with pytest.raises(Mismatch, match="leaf 'w' has 7 elements along axis 0"):
        names.decompose({"w": (7,)})


# Families


def files_of(shapes: Any, kind: str) -> Shapes:
    """The tensors that a model of `transformers` has in files: experts are apart there."""
    found: Shapes = {}
    for parts, shape in flatten((), shapes):
        name = ".".join(parts)
        if parts[-2:-1] == ("experts",):
            found |= experts_of(name, shape, kind)
            continue
        if kind == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if kind == "gpt_neox":
            name = name.replace("lm_head", "embed_out")
        if parts[-1] not in ("weight", "bias", "probe") and not parts[-1].startswith("in_proj"):
            name = name if parts[-1] == "mm_input_projection_weight" else f"{name}.weight"
        found[name] = shape
    return found


def experts_of(name: str, shape: tuple[int, ...], kind: str) -> Shapes:
    above = name.rpartition(".")[0]
    if kind == "mixtral":
        above = above.replace(".mlp.", ".block_sparse_moe.")
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    count, outputs, inputs = shape
    if name.endswith("gate_up_proj"):
        names, outputs = names[:2], outputs // 2
    else:
        names = names[2:]
    return {f"{above}.{e}.{n}.weight": (outputs, inputs) for e in range(count) for n in names}


@pytest.mark.parametrize("name", CASES)
def test_families_make_the_planner_s_parameters(name: str):
    """For every recorded model: the leaves are those that the planner counts, and back."""
    config = CASES[name]
    tensors = files_of(RECORD[name]["shapes"], config["model_type"])
    names = read_names("hf", config)
    leaves = names.compose(tensors)
    needed = {leaf.path: leaf.shape for leaf in leaves if not leaf.optional}
    assert needed == dict(families.parameters_of(config))
    again = names.decompose(needed)
    written = {tensor: leaf.form.shape_before for leaf in again for tensor in leaf.tensors}
    assert shapes_of(names.compose(written)) == shapes_of(leaves)
    if config["model_type"] != "gemma3":  # whose files have had three kinds of names
        assert written == tensors


@pytest.mark.parametrize("kind", families.FAMILIES)
def test_names_and_planner_agree_whether_a_head_is_tied(kind: str):
    tied = families.FAMILIES[kind].defaults.get("tie_word_embeddings", False)
    assert bool(read_names(kind).stand_ins) == tied
    for said in (True, False, None):
        config = {"model_type": kind, "tie_word_embeddings": said}
        has_head = "lm_head/kernel" in dict(families.parameters_of(config))
        assert bool(read_names("hf", config).stand_ins) == (not has_head) == bool(said)


def test_configs_that_are_refused():
    config = {"model_type": "llama", "tie_word_embeddings": "no"}
    with pytest.raises(ValueError, match="has 'no' as its 'tie_word_embeddings'; it must be true"):
        read_names("hf", config)
    with pytest.raises(ValueError, match="has the model_type 'bert', for which there are no"):
        read_names("hf", {"model_type": "bert"})


LLAMA: Shapes = {
    "model.embed_tokens.weight": (10, 4),
    "model.layers.0.self_attn.q_proj.weight": (6, 4),
    "model.norm.weight": (4,),
}


def test_a_tied_head_is_made_of_the_embedding():
    config = {"model_type": "llama", "tie_word_embeddings": True}
    leaves = {leaf.path: leaf for leaf in read_names("hf", config).compose(LLAMA)}
    head = leaves["lm_head/kernel"]
    assert (head.optional, head.shape, head.tensors) == (
        True,
        (4, 10),
        ("model.embed_tokens.weight",),
    )
    # A file may have it although it is tied.
    leaves = {
        leaf.path: leaf
        for leaf in read_names("hf", config).compose({**LLAMA, "lm_head.weight": (10, 4)})
    }
    assert leaves["lm_head/kernel"].tensors == ("lm_head.weight",)
    assert leaves["lm_head/kernel"].optional
    assert "lm_head/kernel" not in shapes_of(read_names("llama").compose(LLAMA))


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model."])
def test_prefixes_of_other_versions_and_buffers(prefix: str):
    tensors = {**LLAMA, "model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    moved = {f"{prefix}{name.removeprefix('model.')}": shape for name, shape in tensors.items()}
    assert shapes_of(read_names("llama").compose(moved)) == shapes_of(
        read_names("llama").compose(LLAMA)
    )


def test_published_names_of_gpt2_and_gemma3():
    gpt2 = {"wte.weight": (9, 4), "h.0.attn.bias": (1, 1, 8, 8), "h.0.attn.c_attn.bias": (12,)}
    assert shapes_of(read_names("gpt2").compose(gpt2)) == {
        "wte/embedding": (9, 4),
        "h/0/attn/c_attn/bias": (12,),
        "lm_head/kernel": (4, 9),
    }
    for above, tower in (
        ("language_model.model.", "vision_tower.vision_model."),
        ("model.language_model.", "model.vision_tower.vision_model."),
        ("language_model.model.", "vision_tower."),
    ):
        gemma3 = {f"{above}norm.weight": (4,), f"{tower}post_layernorm.bias": (3,)}
        assert shapes_of(read_names("gemma3").compose(gemma3)) == {
            "language_model/norm/scale": (4,),
            "vision_tower/post_layernorm/bias": (3,),
        }


# Names of hostile files

LONG = 100_000


@pytest.mark.parametrize("part", ["a", ".", "a.", "/", "a/", "a_", "0", "0.", "ab"])
@pytest.mark.parametrize(
    "pattern",
    [
        "{x*}a{y*}a{z*}!",
        "{x*}.{y*}.{z*}.w!",
        "{a}{b}{c}.w!",
        "{x*}{n}.weight!",
        "{a}_{b}_{c}_{d}!",
        "{x*}.{n}.{y*}.q!",
    ],
)
def test_a_hostile_name_takes_no_time(pattern: str, part: str):
    name = part * (LONG // len(part))
    for is_path in (False, True):
        assert match(pattern, name, is_path=is_path) is None
    with pytest.raises(Mismatch, match="no rule names 1 tensor"):
        read_names({"w": "w", pattern: None}).compose({"w": (), name: ()})


def test_several_placeholders_for_any_number_of_names():
    """The first one takes as much as it can, in long names as in short ones."""
    for length in (1, LONG):
        middle = "m." * length
        found = match("{x*}.to.{y*}.w", f"a.to.b.to.{middle}c.w", is_path=False)
        assert found == {"x": "a.to.b", "y": f"{middle}c"}
        assert match("{x*}.to.{y*}.w", f"to.{middle}to.w", is_path=False) is None
        assert match("{a}_{b}_{c}", "p_" * length + "q_r", is_path=True) is not None


def test_numbers_that_are_parts_of_a_rule_are_compared():
    names = read_names({"{x*}10.w": "ten/{x*}", "{a}{b}": "{a}-{b}", "{rest*}": "o/{rest*}"})
    tensors: Shapes = {"l.9.w": (1,), "l.10.w": (2,), "7": (3,), "77": (4,)}
    found = shapes_of(names.compose(tensors))
    assert found == {"o/l/9/w": (1,), "ten/l/": (2,), "o/7": (3,), "7-7": (4,)}


def test_a_name_of_too_many_parts_is_refused():
    with pytest.raises(Mismatch, match=r"'a/a/.* would be a leaf in 50,000 containers; .*most 200"):
        read_names({"{x*}": "{x*}"}).compose({"a." * (LONG // 2) + "b": ()})
