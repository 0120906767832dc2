import copy
import json
import os
import pickle
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, OlmoeConfig, Qwen3MoeConfig

from acceptmoe import table as table_module
from acceptmoe.errors import InvalidArgumentError, TableError
from acceptmoe.table import (
    MIN_COMMITMENT,
    PRESERVED_FINGERPRINT,
    SCHEMA_VERSION,
    CalibrationCurve,
    CommitmentTable,
    DepthStatistics,
    HeldOutError,
    Provenance,
    check_can_save,
    config_fingerprint,
    shipped_tables,
)


def make_table(**changes):
    table = CommitmentTable(
        target="tiny-olmoe",
        target_fingerprint="0123456789abcdef",
        drafter="ngram",
        num_nodes=32,
        max_depth=3,
        depths=DepthStatistics(trials=(40, 40, 40, 40), successes=(40, 30, 20, 5)),
        curve=CalibrationCurve((0.0, 0.25, 0.5, 0.75), (0.0, 0.1, 0.1, 0.9)),
        held_out_error=HeldOutError(curve=0.01, raw=0.2, num_prompts=5, num_nodes=900),
        provenance=Provenance(
            dataset="gsm8k, train",
            seeds=(0, 7),
            num_prompts=20,
            acceptmoe_version="0.1.0",
            command="acceptmoe calibrate --target tiny-olmoe",
        ),
    )
    return replace(table, **changes)


def edited(**changes):
    """The JSON of a good table with some fields changed: dots go down, None removes."""
    content = json.loads(make_table().to_json())
    for path, value in changes.items():
        *parents, name = path.split("__")
        part = content
        for parent in parents:
            part = part[parent]
        if value is None:
            del part[name]
        else:
            part[name] = value
    return json.dumps(content)


def check(table, **changes):
    running = {
        "target_fingerprint": "0123456789abcdef",
        "drafter": "ngram",
        "num_nodes": 32,
        "max_depth": 3,
        "needs_depths": True,
    }
    table.check(**(running | changes))


def test_a_saved_table_loads_as_it_was(tmp_path):
    table = make_table()
    table.save(tmp_path / "a.json")
    loaded = CommitmentTable.load(tmp_path / "a.json")
    assert loaded == table
    assert loaded.to_json() == table.to_json()
    assert loaded.source == str(tmp_path / "a.json")


def test_json_keeps_every_bit_of_the_numbers():
    rng = np.random.default_rng(0)
    knots = tuple(np.unique(rng.random(20).astype(np.float32)).astype(float).tolist())
    values = tuple(np.sort(rng.random(len(knots))).tolist())
    table = make_table(curve=CalibrationCurve(knots, values))
    assert CommitmentTable.from_json(table.to_json()) == table


def test_saving_replaces_a_table_and_leaves_no_other_file(tmp_path):
    path = tmp_path / "a.json"
    make_table().save(path)
    make_table(drafter="eagle3").save(path)
    assert CommitmentTable.load(path).drafter == "eagle3"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_saved_table_can_be_read_by_whom_the_umask_allows(tmp_path):
    previous = os.umask(0o022)
    try:
        make_table().save(tmp_path / "a.json")
    finally:
        os.umask(previous)
    assert stat.S_IMODE(os.stat(tmp_path / "a.json").st_mode) == 0o644


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_save_keeps_the_old_table_and_no_part_of_the_new(
    tmp_path, monkeypatch, failing, error
):
    path = tmp_path / "a.json"
    make_table().save(path)

    def fail(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(table_module.os, failing, fail)
        expected = TableError if isinstance(error, OSError) else KeyboardInterrupt
        with pytest.raises(expected):
            make_table(drafter="eagle3").save(path)
    assert CommitmentTable.load(path) == make_table()
    assert os.listdir(tmp_path) == ["a.json"]


def test_saving_through_a_link_keeps_the_link(tmp_path):
    make_table().save(tmp_path / "a.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "a.json")
    make_table(drafter="eagle3").save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert CommitmentTable.load(tmp_path / "a.json").drafter == "eagle3"


def test_saving_into_a_missing_folder_says_so(tmp_path):
    with pytest.raises(TableError, match=r"cannot be written to .*no/a\.json: No such file"):
        make_table().save(tmp_path / "no" / "a.json")


def test_a_shipped_table_loads_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(table_module, "asset_dir", lambda kind: tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    make_table().save(tmp_path / "tiny-olmoe__ngram.json")
    assert shipped_tables() == ["tiny-olmoe__ngram"]
    assert CommitmentTable.load("tiny-olmoe__ngram") == make_table()
    with pytest.raises(TableError, match=r"no table 'tiny'; .*\(tiny-olmoe__ngram\).*calibrate"):
        CommitmentTable.load("tiny")
    with pytest.raises(TableError, match=r"no table '\.\./x'"):
        CommitmentTable.load("../x")


def test_every_shipped_table_loads():
    for name in shipped_tables():
        CommitmentTable.load(name)


def test_a_folder_is_not_a_table(tmp_path):
    with pytest.raises(TableError, match=r"cannot be read: Is a directory"):
        CommitmentTable.load(tmp_path)


def test_a_pickle_is_refused_and_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "a.json"
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(TableError, match=r"a\.json is not text in UTF-8"):
        CommitmentTable.load(path)
    assert not (tmp_path / "ran").exists()


def test_every_truncation_is_refused_by_name(tmp_path):
    text = make_table().to_json().rstrip()
    path = tmp_path / "a.json"
    for length in range(len(text)):
        path.write_text(text[:length])
        with pytest.raises(TableError, match=r"a\.json: .*(truncated|not JSON|empty)"):
            CommitmentTable.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ('{"schema": 1, "target"', "the file ends in the middle, it is truncated"),
        ('{"schema": 1, "target": "tin', "the file ends in the middle, it is truncated"),
        ("schema: 1", "it is not JSON"),
        ("[1, 2]", r"it holds \[1, 2\]; a commitment table is a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema": ' + "9" * 5000 + "}", "an impossible number"),
        ('{"schema": 1, "schema": 1}', "the field schema appears twice"),
        ("{}", "the field schema is missing"),
    ],
)
def test_text_that_is_no_table_is_refused(text, message):
    with pytest.raises(TableError, match=message):
        CommitmentTable.from_json(text)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_not_finite_is_refused(number):
    text = edited(held_out_error__raw="HERE").replace('"HERE"', number)
    with pytest.raises(TableError, match=rf"it holds {number}, which is no JSON number"):
        CommitmentTable.from_json(text)


def test_a_number_that_overflows_is_refused():
    text = edited(held_out_error__raw="HERE").replace('"HERE"', "1e999")
    with pytest.raises(TableError, match=r"held_out_error\.raw is inf; it must lie in \[0, 1\]"):
        CommitmentTable.from_json(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": SCHEMA_VERSION + 1}, r"schema is 2 .* update acceptmoe: pip install --upgrade"),
        ({"schema": 10**80}, r"schema is 1000.*\.\.\. .* update acceptmoe"),
        ({"schema": 0}, "schema is 0; it must be 1"),
        ({"schema": "1"}, "schema is '1'; it must be an integer"),
        ({"schema": True}, "schema is True; it must be an integer"),
        ({"drafter": None}, "the field drafter is missing"),
        ({"curve__commitments": None}, r"the field curve\.commitments is missing"),
        ({"provenance__command": None}, r"the field provenance\.command is missing"),
        ({"colour": "red"}, "unknown field colour"),
        ({"depths__colour": "red"}, r"unknown field depths\.colour"),
        ({"curve": [1]}, r"curve is \[1\]; it must be an object"),
        ({"target": 3}, "target is 3; it must be a text"),
        ({"target": " "}, "target is empty"),
        ({"num_nodes": 32.0}, r"num_nodes is 32\.0; it must be an integer"),
        ({"num_nodes": 1}, "num_nodes is 1; it must be 2 or larger"),
        ({"num_nodes": 10**9}, "num_nodes is 1000000000; it must be 4096 or smaller"),
        ({"max_depth": 0}, "max_depth is 0; it must be 1 or larger"),
        ({"max_depth": 4}, "depths covers depths 0 to 3 and max_depth is 4"),
        ({"depths__trials": 40}, r"depths\.trials is 40; it must be a list"),
        ({"depths__trials": [40, 40, 40]}, "depths has 3 trials and 4 successes"),
        ({"depths__trials": []}, "depths has 0 trials and 4 successes"),
        ({"depths__trials": [40, 40, 40, "x"]}, r"depths\.trials\[3\] is 'x'.* an integer"),
        ({"depths__trials": [40, 40, 40, 0]}, r"depths\.trials\[3\] is 0; it must be 1"),
        ({"depths__successes": [40, 41, 2, 1]}, r"successes\[1\] is 41, more than the 40 trials"),
        ({"depths__successes": [40, 30, 2, -1]}, r"successes\[3\] is -1; it must be 0"),
        ({"depths__successes": [39, 30, 2, 1]}, r"successes\[0\] is 39 .*it must be 1"),
        ({"depths__successes": [40, 10, 20, 1]}, r"commitment 0\.5 at depth 2, more than 0\.25"),
        (
            {"curve__path_probabilities": [0.0, 0.5, 0.25, 0.75]},
            r"curve\.path_probabilities\[2\] is 0\.25 after 0\.5; the knots must ascend",
        ),
        (
            {"curve__path_probabilities": [0.0, 0.5, 0.5, 0.75]},
            r"curve\.path_probabilities\[2\] is 0\.5 after 0\.5; the knots must ascend",
        ),
        (
            {"curve__path_probabilities": [0.0, 0.5, 0.5 + 1e-12, 0.75]},
            "by more than fp32 rounding",
        ),
        (
            {"curve__commitments": [0.0, 0.2, 0.1, 0.9]},
            r"curve\.commitments\[2\] is 0\.1 after 0\.2; the curve must never descend",
        ),
        ({"curve__commitments": [0.0, 0.2, 0.3, 1.1]}, r"commitments\[3\] is 1\.1; it must lie"),
        ({"curve__commitments": [0.0, 0.2, 0.3, True]}, r"commitments\[3\] is True; .* a number"),
        ({"curve__path_probabilities": [-0.1, 0.2, 0.3, 0.4]}, r"path_probabilities\[0\] is -0\.1"),
        ({"curve__path_probabilities": [0.5]}, "1 path_probabilities and 4 commitments"),
        ({"curve": {"path_probabilities": [0.5], "commitments": [0.5]}}, "at least 2"),
        ({"held_out_error__curve": -1}, r"held_out_error\.curve is -1; it must lie in \[0, 1\]"),
        ({"held_out_error__curve": 10**400}, r"held_out_error\.curve is 1000.*; it must lie"),
        ({"held_out_error__num_prompts": 0}, r"held_out_error\.num_prompts is 0"),
        ({"provenance__seeds": ["a"]}, r"provenance\.seeds\[0\] is 'a'; it must be an integer"),
        ({"provenance__num_prompts": 0}, r"provenance\.num_prompts is 0; it must be 1 or larger"),
    ],
)
def test_a_wrong_field_is_named(tmp_path, changes, message):
    path = tmp_path / "a.json"
    path.write_text(edited(**changes))
    with pytest.raises(TableError, match=message) as error:
        CommitmentTable.load(path)
    assert str(error.value).startswith(f"{path}: ")


def test_a_future_schema_asks_for_an_update_whatever_else_it_holds():
    with pytest.raises(TableError, match="update acceptmoe"):
        CommitmentTable.from_json('{"schema": 99, "everything": "different"}')


def test_an_error_text_stays_short_whatever_the_file_holds():
    with pytest.raises(TableError) as error:
        CommitmentTable.from_json(edited(target=["x" * 1_000_000]))
    assert len(str(error.value)) < 300


def test_depth_commitment_is_the_share_of_blocks_at_that_depth():
    table = make_table()
    depths = torch.tensor([0, 1, 1, 3, 2])
    expected = torch.tensor([1.0, 0.75, 0.75, 0.125, 0.5])
    assert torch.equal(table.depth_commitment(depths), expected)
    assert torch.equal(table.depth_commitment(depths.to(torch.int32)), expected)


def test_depths_beyond_the_table_count_as_its_last():
    assert make_table().depth_commitment(torch.tensor([0, 9])).tolist() == [1.0, 0.125]


def test_path_commitment_is_linear_between_knots_and_flat_outside():
    rng = np.random.default_rng(1)
    for num_knots in (2, 3, 17):
        x = np.sort(rng.choice(1000, num_knots, replace=False)) / 1000
        y = np.sort(rng.random(num_knots))
        table = make_table(curve=CalibrationCurve(tuple(x.tolist()), tuple(y.tolist())))
        p = np.concatenate([[1.0], rng.random(200), x, [0.0, 1.0]])
        expected = np.interp(p, x, y).clip(MIN_COMMITMENT, 1.0)
        expected[0] = 1.0
        got = table.path_commitment(torch.tensor(p, dtype=torch.float32))
        # fp32 slopes: knots a thousandth apart, rounding 6e-8 of values up to 1.
        torch.testing.assert_close(got.double(), torch.tensor(expected), atol=2e-4, rtol=0)


def test_path_commitment_hits_the_knots_exactly_and_never_descends():
    curve = CalibrationCurve((0.1, 0.2, 0.3, 0.9), (0.05, 0.3, 0.3, 0.8))
    table = make_table(curve=curve)
    at_knots = table.path_commitment(torch.tensor([1.0, *curve.path_probabilities]))[1:]
    assert torch.equal(at_knots, torch.tensor(curve.commitments))
    p = torch.linspace(0, 1, 10_001)
    assert (table.path_commitment(p)[1:].diff() >= -1e-7).all()  # one rounding of the line


def test_below_the_least_path_probability_every_commitment_is_too_small():
    """0.05 at 0.1 and 0.3 at 0.2 and 0.3: 0.175 is reached in the middle, at 0.15."""
    table = make_table(curve=CalibrationCurve((0.1, 0.2, 0.3, 0.9), (0.05, 0.3, 0.3, 0.8)))
    assert table.min_path_probability(0.175) == pytest.approx(0.15, abs=2**-12)
    assert table.min_path_probability(0.175) <= 0.15
    assert table.min_path_probability(0.04) == 0.0
    assert table.min_path_probability(0.9) == 1.0
    for commitment in (0.06, 0.3, 0.31, 0.8):
        below = torch.linspace(0, table.min_path_probability(commitment) - 1e-6, 100)
        assert (table.path_commitment(below)[1:] < commitment).all()


def test_the_root_has_commitment_one_and_no_other_row_needs_to():
    table = make_table()
    commitment = table.path_commitment(torch.tensor([1.0, 1.0, 0.0]))
    assert commitment[0] == 1.0
    assert commitment[1] == torch.tensor(0.9)
    assert commitment[2] == torch.tensor(MIN_COMMITMENT)
    assert table.path_commitment(torch.tensor([1.0])).tolist() == [1.0]


def test_path_commitment_takes_any_float_and_returns_fp32():
    table = make_table()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        commitment = table.path_commitment(torch.tensor([1.0, 0.5], dtype=dtype))
        assert commitment.dtype == torch.float32
        assert commitment.tolist() == [1.0, pytest.approx(0.1)]


def test_the_tensors_are_placed_once_for_each_device(monkeypatch):
    table = make_table()
    table.place_on(torch.device("cpu"))

    def refuse(*args):
        raise AssertionError("copied again")

    monkeypatch.setattr(table_module, "_fp32", refuse)
    table.place_on(torch.device("cpu"))
    table.path_commitment(torch.tensor([1.0, 0.5]))
    table.depth_commitment(torch.tensor([0, 1]))


def test_the_tensor_functions_read_nothing_back():
    # Tensors without data: any value asked for on the host raises.
    table = make_table()
    probabilities = torch.empty(5, device="meta")
    assert table.path_commitment(probabilities).shape == (5,)
    assert table.depth_commitment(torch.empty(5, dtype=torch.int64, device="meta")).shape == (5,)


def test_a_table_first_used_in_inference_mode_works_outside():
    table = make_table()
    with torch.inference_mode():
        table.path_commitment(torch.tensor([1.0, 0.5]))
    weight = torch.ones(2, requires_grad=True)
    (table.path_commitment(torch.tensor([1.0, 0.5])) * weight).sum().backward()


def test_a_table_copies_and_hashes():
    table = make_table()
    table.place_on(torch.device("cpu"))
    assert copy.deepcopy(table) == table
    assert hash(make_table()) == hash(table)


def test_the_matching_run_is_accepted():
    check(make_table())
    check(make_table(), max_depth=2)


def test_another_target_is_always_refused():
    for changes in ({}, {"needs_depths": False}, {"allow_mismatch": True}):
        with pytest.raises(TableError, match=r"made for the target tiny-olmoe .*f{16}.*calibrate"):
            check(make_table(), target_fingerprint="f" * 16, **changes)


def test_another_drafter_is_always_refused():
    for changes in ({}, {"needs_depths": False}, {"allow_mismatch": True}):
        with pytest.raises(TableError, match=r"drafter 'ngram' and this one is 'eagle3'"):
            check(make_table(), drafter="eagle3", **changes)


def test_a_deeper_tree_is_refused_where_the_depth_counts():
    with pytest.raises(TableError, match=r"covers depths 0 to 3 .* depth 8; .*--max-depth 8"):
        check(make_table(), max_depth=8)
    check(make_table(), max_depth=8, needs_depths=False)
    check(make_table(), max_depth=8, allow_mismatch=True)


def test_another_number_of_nodes_is_refused_where_the_depth_counts():
    with pytest.raises(TableError, match=r"trees of 32 nodes and this one has 16.*num_nodes=32"):
        check(make_table(), num_nodes=16)
    check(make_table(), num_nodes=16, needs_depths=False)
    check(make_table(), num_nodes=16, allow_mismatch=True)


def test_the_fingerprint_ignores_what_does_not_define_the_target():
    config = Qwen3MoeConfig(num_hidden_layers=3)
    same = Qwen3MoeConfig(num_hidden_layers=3, dtype="bfloat16", use_cache=False)
    same._name_or_path = "elsewhere/model"
    same.transformers_version = "9.9.9"
    same._attn_implementation = "eager"
    assert config_fingerprint(config) == config_fingerprint(same)
    assert config_fingerprint(config) == config_fingerprint(config.to_dict())


def test_the_fingerprint_survives_the_renaming_of_fields_between_versions():
    now = Qwen3MoeConfig().to_dict()
    before = dict(now)
    before["num_experts"] = before.pop("num_local_experts")
    before["rope_theta"] = 10000  # an integer outside rope_parameters
    del before["rope_parameters"], before["norm_topk_prob"], before["mlp_only_layers"]
    assert config_fingerprint(before) == config_fingerprint(now)


def test_the_fingerprint_tells_targets_apart():
    configs = [
        Qwen3MoeConfig(),
        Qwen3MoeConfig(num_hidden_layers=3),
        Qwen3MoeConfig(num_experts=64),
        Qwen3MoeConfig(num_experts_per_tok=4),
        Qwen3MoeConfig(norm_topk_prob=True),
        Qwen3MoeConfig(vocab_size=1000),
        Qwen3MoeConfig(hidden_size=1024),
        Qwen3MoeConfig(moe_intermediate_size=512),
        OlmoeConfig(),
        GptOssConfig(),
        GptOssConfig(sliding_window=64),
    ]
    assert len({config_fingerprint(config) for config in configs}) == len(configs)


def test_a_widened_target_keeps_the_fingerprint_of_its_original():
    config = OlmoeConfig(hidden_size=4096)
    setattr(config, PRESERVED_FINGERPRINT, config_fingerprint(OlmoeConfig()))
    assert config_fingerprint(config) == config_fingerprint(OlmoeConfig())


def test_the_language_model_inside_a_multimodal_one_counts():
    inner = OlmoeConfig().to_dict()
    outer = {"model_type": "picture", "text_config": inner}
    assert config_fingerprint(outer) == config_fingerprint(inner)


def test_a_configuration_without_model_type_is_refused():
    with pytest.raises(InvalidArgumentError, match="no model_type"):
        config_fingerprint({"hidden_size": 4})


def test_a_path_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    check_can_save(tmp_path / "a.json")
    make_table().save(tmp_path / "a.json")
    check_can_save(tmp_path / "a.json")
    with pytest.raises(TableError, match=r"cannot be written to .*: it is a folder"):
        check_can_save(tmp_path)
    with pytest.raises(TableError, match=r"there is no folder .*/no;"):
        check_can_save(tmp_path / "no" / "a.json")
    monkeypatch.setattr(table_module.os, "access", lambda path, mode: False)
    with pytest.raises(TableError, match="is not writable"):
        check_can_save(tmp_path / "b.json")
    assert os.listdir(tmp_path) == ["a.json"]
