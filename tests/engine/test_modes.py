"""The mode table, written out by hand from TensorRT-LLM's documented predicates."""

from __future__ import annotations

from typing import Any

import pytest

from trtspec import (
    AutoDecodingConfig,
    DFlashDecodingConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SaveHiddenStatesDecodingConfig,
    UserProvidedDecodingConfig,
)
from trtspec import SpeculativeDecodingMode as Mode
from trtspec.config import (
    CudaGraphConfig,
    DecodingBaseConfig,
    KvCacheConfig,
    resolve_speculative_config,
)
from trtspec.errors import ConfigError
from trtspec.workers import (
    DraftTargetWorker,
    Eagle3OneModelWorker,
    MTPEagleWorker,
    MTPWorker,
    NGramWorker,
    PlainWorker,
    SaveHiddenStatesWorker,
    SAWorker,
    SpecWorkerBase,
    create_worker,
)


class NoDrafter:
    def draft(self, request_id: int, token_ids: Any, max_draft_len: int) -> list[int]:
        return []


DRAFTER = NoDrafter()
BLOCKS = {Mode.DFLASH, Mode.DSPARK}
HEADS = {Mode.MTP, Mode.MTP_EAGLE_ONE_MODEL, Mode.EAGLE3_ONE_MODEL, *BLOCKS}
ONE_ENGINE = {*HEADS, Mode.SA}
DRAFT_MODEL = {Mode.EAGLE3, Mode.DRAFT_TARGET, Mode.MTP_EAGLE}
DRAFTERS = {*DRAFT_MODEL, Mode.NGRAM, Mode.USER_PROVIDED, Mode.SAVE_HIDDEN_STATES}
TABLE = {
    "is_mtp_one_model": {Mode.MTP, Mode.MTP_EAGLE_ONE_MODEL},
    "is_mtp_vanilla": {Mode.MTP},
    "is_mtp_eagle": {Mode.MTP_EAGLE},
    "is_mtp_eagle_one_model": {Mode.MTP_EAGLE_ONE_MODEL},
    "is_eagle3": {Mode.EAGLE3},
    "is_eagle3_one_model": {Mode.EAGLE3_ONE_MODEL},
    "is_dflash": {Mode.DFLASH},
    "is_dspark": {Mode.DSPARK},
    "is_ngram": {Mode.NGRAM},
    "is_sa": {Mode.SA},
    "is_draft_target": {Mode.DRAFT_TARGET},
    "is_user_provided": {Mode.USER_PROVIDED},
    "is_save_hidden_states": {Mode.SAVE_HIDDEN_STATES},
    "is_none": {Mode.NONE},
    "use_one_engine": ONE_ENGINE,
    "without_logits": ONE_ENGINE,
    "support_capturable_guided_decoder": ONE_ENGINE,
    "needs_kv_cache_rewind": {*ONE_ENGINE, Mode.NGRAM},
    "has_draft_model": DRAFT_MODEL,
    # Ours does more than TensorRT-LLM's here: NGRAM drafts on the device, plain decoding
    # overlaps, hidden states are copied out asynchronously.
    "support_overlap_scheduler": {
        *ONE_ENGINE,
        *DRAFT_MODEL,
        Mode.NGRAM,
        Mode.NONE,
        Mode.SAVE_HIDDEN_STATES,
    },
    # Predicates of ours.
    "drafts_in_step": {*ONE_ENGINE, Mode.NGRAM, Mode.DRAFT_TARGET},
    "drafts_in_passes": {Mode.EAGLE3, Mode.MTP_EAGLE},
    "drafts_on_host": {Mode.USER_PROVIDED},
    "drafts_with_network": {*HEADS, *DRAFT_MODEL},
    "needs_kv_cache_recompute": {Mode.EAGLE3, Mode.MTP_EAGLE},
    "need_load_draft_weights": {Mode.EAGLE3_ONE_MODEL, *BLOCKS},
    "has_spec_decoder": {*ONE_ENGINE, Mode.MTP_EAGLE, Mode.EAGLE3},
    "has_spec_drafter": DRAFTERS,
    "support_guided_decoder": {Mode.NONE, *DRAFTERS},
}


class WithKernel:
    supports_multi_token_generation = True


class WithoutKernel:
    supports_multi_token_generation = False


@pytest.mark.parametrize("predicate", TABLE)
def test_predicates(predicate: str) -> None:
    assert {mode for mode in Mode if getattr(mode, predicate)()} == TABLE[predicate]


def test_members_and_names() -> None:
    assert [mode.name for mode in Mode] == [
        "MTP", "MTP_EAGLE", "MTP_EAGLE_ONE_MODEL", "EAGLE3", "EAGLE3_ONE_MODEL", "NGRAM",
        "DRAFT_TARGET", "USER_PROVIDED", "SAVE_HIDDEN_STATES", "NONE", "AUTO", "DFLASH",
        "DSPARK", "SA",
    ]  # fmt: skip
    assert Mode.from_string(None) is Mode.NONE
    for mode in Mode:
        assert Mode.from_string(mode.name.lower()) is mode
        assert Mode.from_string(mode.name.title()) is mode
    with pytest.raises(ConfigError, match=r"MEDUSA.*Allowed: MTP, "):
        Mode.from_string("MEDUSA")


def test_extend_ctx_and_spec_dec_attention() -> None:
    for mode in Mode:
        assert not mode.extend_ctx(WithKernel)
        assert mode.extend_ctx(WithoutKernel) == (mode not in ONE_ENGINE)
        assert not mode.attention_need_spec_dec_mode(None, False, WithoutKernel, True)

    class FirstDraft:
        is_first_draft = True

    class LaterDraft:
        is_first_draft = False

    for mode in set(Mode) - {Mode.NONE}:
        assert mode.attention_need_spec_dec_mode(None, False, WithKernel, False)
        one = mode in ONE_ENGINE
        assert mode.attention_need_spec_dec_mode(FirstDraft(), True, WithKernel, True)
        assert mode.attention_need_spec_dec_mode(FirstDraft(), True, WithKernel, False) == one
        assert mode.attention_need_spec_dec_mode(LaterDraft(), True, WithKernel, True) == one


def test_tensorrt_llm_s_dictionaries() -> None:
    values = {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model": "d"}
    assert EagleDecodingConfig.from_dict(values) == EagleDecodingConfig(
        max_draft_len=3, speculative_model="d"
    )
    assert values["decoding_type"] == "Eagle", "the caller's dictionary is left alone"
    assert DraftTargetDecodingConfig.from_dict(
        {"decoding_type": "Draft_Target", "speculative_model": "d"}
    ).spec_dec_mode is Mode.DRAFT_TARGET  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fields", "config"),
    [
        ("Eagle", {"speculative_model": "d"}, EagleDecodingConfig(speculative_model="d")),
        ("Eagle3", {"speculative_model": "d"}, EagleDecodingConfig(speculative_model="d")),
        (
            "PARD",
            {"speculative_model": "d"},
            DraftTargetDecodingConfig(speculative_model="d", parallel_drafting=True),
        ),
        ("DFlash2", {"speculative_model": "d"}, DFlashDecodingConfig(speculative_model="d")),
        ("MTP", {"max_draft_len": 3}, MTPDecodingConfig(num_nextn_predict_layers=3)),
        ("NGram", {"max_draft_len": 3}, NGramDecodingConfig(max_draft_len=3)),
        ("Auto", {"max_draft_len": 3}, NGramDecodingConfig(max_draft_len=3)),
        ("SA", {"enable_global_pool": False}, SADecodingConfig(enable_global_pool=False)),
        ("User_Provided", {"drafter": DRAFTER}, UserProvidedDecodingConfig(drafter=DRAFTER)),
    ],
)
def test_a_decoding_type_says_the_class(
    kind: str, fields: dict[str, Any], config: DecodingBaseConfig
) -> None:
    assert resolve_speculative_config({"decoding_type": kind, **fields}) == config


def test_drafts_of_mtp_layers_have_two_names() -> None:
    for fields in ({"max_draft_len": 3}, {"num_nextn_predict_layers": 3}):
        config = MTPDecodingConfig(**fields)
        assert (config.max_draft_len, config.num_nextn_predict_layers) == (3, 3)
    assert MTPDecodingConfig().max_draft_len == MTPDecodingConfig().num_nextn_predict_layers == 1


def test_modes_of_configs() -> None:
    assert EagleDecodingConfig(speculative_model="d").spec_dec_mode is Mode.EAGLE3_ONE_MODEL
    assert EagleDecodingConfig(
        speculative_model="d", eagle3_one_model=False
    ).spec_dec_mode is Mode.EAGLE3  # fmt: skip
    assert MTPDecodingConfig(use_mtp_vanilla=True).spec_dec_mode is Mode.MTP
    assert MTPDecodingConfig(num_nextn_predict_layers=3).max_draft_len == 3
    assert MTPDecodingConfig(mtp_eagle_one_model=False).spec_dec_mode is Mode.MTP_EAGLE
    assert isinstance(resolve_speculative_config(AutoDecodingConfig()), NGramDecodingConfig)


@pytest.mark.parametrize(
    ("config", "worker"),
    [
        (None, PlainWorker),
        (NGramDecodingConfig(), NGramWorker),
        (SADecodingConfig(), SAWorker),
        (DraftTargetDecodingConfig(speculative_model="d"), DraftTargetWorker),
        (EagleDecodingConfig(speculative_model="d", max_draft_len=2), Eagle3OneModelWorker),
        (
            EagleDecodingConfig(speculative_model="d", max_draft_len=2, eagle3_one_model=False),
            Eagle3OneModelWorker,
        ),
        (MTPDecodingConfig(), MTPEagleWorker),
        (MTPDecodingConfig(mtp_eagle_one_model=False), MTPEagleWorker),
        (MTPDecodingConfig(use_mtp_vanilla=True), MTPWorker),
        (SaveHiddenStatesDecodingConfig(output_directory="d"), SaveHiddenStatesWorker),
    ],
)
def test_every_mode_has_a_worker(
    config: DecodingBaseConfig | None, worker: type[SpecWorkerBase]
) -> None:
    made = create_worker(config)
    assert type(made) is worker
    assert made.max_draft_len == (0 if config is None else config.max_draft_len)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NGramDecodingConfig(max_draft_len=-1), r"max_draft_len=-1.*1 … 64"),
        (lambda: NGramDecodingConfig(max_draft_len=0), "max_draft_len=0"),
        (lambda: NGramDecodingConfig(max_draft_len=True), "max_draft_len=True"),
        (lambda: NGramDecodingConfig(max_draft_len=2.0), "max_draft_len=2.0"),
        (lambda: NGramDecodingConfig(max_matching_ngram_size=0), "max_matching_ngram_size=0"),
        (
            lambda: NGramDecodingConfig(max_matching_ngram_size=2, min_matching_ngram_size=3),
            "above max_matching_ngram_size=2",
        ),
        (lambda: SADecodingConfig(max_matching_ngram_size=0), "max_matching_ngram_size=0"),
        (
            lambda: SADecodingConfig(max_matching_ngram_size=2, min_matching_ngram_size=3),
            "above max_matching_ngram_size=2",
        ),
        (lambda: SADecodingConfig(min_token_prob=1.5), r"min_token_prob=1.5.*0 … 1"),
        (lambda: SADecodingConfig(match_decay=-1), "match_decay=-1"),
        (lambda: SADecodingConfig(match_decay="a"), "match_decay='a'"),
        (lambda: SADecodingConfig(enable_global_pool=1), "enable_global_pool=1"),
        (lambda: SADecodingConfig(global_pool_tokens=1), "global_pool_tokens=1"),
        (lambda: SADecodingConfig(global_pool_size=0), "global_pool_size=0"),
        (lambda: NGramDecodingConfig.from_dict({"max_draft": 3}), "no field max_draft.*Known"),
        (lambda: NGramDecodingConfig.from_dict({"decoding_type": "MTP"}), "must be 'NGram'"),
        (lambda: KvCacheConfig(free_gpu_memory_fraction="a"), "fraction='a'.*a number in"),
        (lambda: UserProvidedDecodingConfig(drafter=object()), "has no method draft"),
        (lambda: EagleDecodingConfig(), "speculative_model is required: give a head's directory"),
        (lambda: MTPDecodingConfig(speculative_model=5), "=5 is not a path: give a head's dir"),
        (lambda: DraftTargetDecodingConfig(), "is required: give a model's directory or name"),
        (lambda: MTPDecodingConfig(num_nextn_predict_layers=2, max_draft_len=3), "differs from"),
        (
            lambda: MTPDecodingConfig(num_nextn_predict_layers=3, draft_len_schedule={4: 5}),
            r"draft_len_schedule=\{4: 5\}.*in 0 … 3, like \{4: 3, 8: 2, 32: 1\}, \"auto\"",
        ),
        (lambda: MTPDecodingConfig(relaxed_delta=1.5), "relaxed_delta=1.5"),
        (lambda: MTPDecodingConfig(relaxed_topk=0), "relaxed_topk=0"),
        (lambda: MTPDecodingConfig(relaxed_delta="a"), "relaxed_delta='a'"),
        (lambda: MTPDecodingConfig(use_mtp_vanilla="no"), "use_mtp_vanilla='no'"),
        (lambda: MTPDecodingConfig(max_draft_len="3"), "max_draft_len='3'.*0 … 64"),
        (
            lambda: MTPDecodingConfig(use_mtp_vanilla=True, mtp_eagle_one_model=False),
            "give one of them",
        ),
        (
            lambda: EagleDecodingConfig(speculative_model="d", eagle3_one_model="no"),
            "eagle3_one_model='no'",
        ),
        (
            lambda: MTPDecodingConfig(begin_thinking_phase_token=5, end_thinking_phase_token=5),
            "two different tokens",
        ),
        (lambda: MTPDecodingConfig(speculative_model=" "), "speculative_model"),
        (
            lambda: EagleDecodingConfig(speculative_model="d", eagle3_layers_to_capture=[-1]),
            r"eagle3_layers_to_capture=\[-1\]",
        ),
        (
            lambda: EagleDecodingConfig(speculative_model="d", eagle3_layers_to_capture="1"),
            "eagle3_layers_to_capture='1'",
        ),
        (lambda: EagleDecodingConfig(speculative_model="d", max_draft_len=65), "0 … 64"),
        (lambda: create_worker(EagleDecodingConfig(speculative_model="d")), "needs the number"),
        (lambda: NGramDecodingConfig(max_concurrency=0), "max_concurrency=0"),
        (lambda: SaveHiddenStatesDecodingConfig(), "output_directory is required"),
        (
            lambda: SaveHiddenStatesDecodingConfig(output_directory="d", tokens_per_file=0),
            "tokens_per_file=0",
        ),
        (lambda: KvCacheConfig(max_tokens=0), "max_tokens=0"),
        (lambda: CudaGraphConfig(batch_sizes=[0]), r"batch_sizes=\[0\]"),
        (lambda: CudaGraphConfig(batch_sizes=[]), "batch_sizes"),
        (lambda: CudaGraphConfig(enable_padding=1), "enable_padding=1"),
        (lambda: KvCacheConfig(free_gpu_memory_fraction=0.0), "free_gpu_memory_fraction=0.0"),
        (lambda: resolve_speculative_config("ngram"), "not a decoding config.*NGramDecodingConfig"),
    ],
)
def test_bad_configs_say_what_is_allowed(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("fields", "warns"),
    [
        ({}, False),
        ({"use_relaxed_acceptance_for_thinking": True}, True),
        ({"relaxed_topk": 10, "relaxed_delta": 0.6}, True),
        (
            {
                "use_relaxed_acceptance_for_thinking": True,
                "relaxed_topk": 10,
                "relaxed_delta": 0.6,
            },
            False,
        ),
    ],
)
def test_relaxed_fields_that_relax_nothing_warn(
    fields: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    MTPDecodingConfig(**fields)
    assert ("relaxes nothing" in caplog.text) == warns


def test_graph_sizes() -> None:
    assert CudaGraphConfig().buckets(1) == [1]
    assert CudaGraphConfig().buckets(12) == [1, 2, 4, 8, 12]
    assert CudaGraphConfig().buckets(32) == [1, 2, 4, 8, 16, 24, 32]
    assert CudaGraphConfig(batch_sizes=[16, 2, 64]).buckets(32) == [2, 16, 32]


def test_configs_are_frozen_and_refuse_unknown_arguments() -> None:
    config = NGramDecodingConfig()
    with pytest.raises(AttributeError):
        config.max_draft_len = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="max_drafts"):
        NGramDecodingConfig(max_drafts=3)  # type: ignore[call-arg]


def test_other_names_of_a_draft_model() -> None:
    assert Mode.PARD is Mode.DRAFT_TARGET_ONE_MODEL is Mode.DRAFT_TARGET
    assert Mode.from_string("pard") is Mode.DRAFT_TARGET
    assert "PARD" not in [mode.name for mode in Mode]
