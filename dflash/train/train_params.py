"""Parameters of the `train` stage (`train:`): the drafter, its objective and its optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from dflash.base.params import Params, derived, keyed, placement
from dflash.model.target_params import Dtype, Kernels, TargetIdentity


class ContinueFrom(Params):
    """`train.continue_from:` start from another training's checkpoint; makes a new key with its lineage."""

    key: str = Field(pattern=r"^[0-9a-f]{12}$", description="key of the training to continue")
    step: int = keyed(ge=1, unit="steps", description="its step")
    what: Literal["weights", "state"] = Field(
        "weights", description="weights only, or with optimizer moments and cursor"
    )


class Topology(Params):
    """`train.topology:` how many processes play each role. Batch i of a step goes to target i mod `targets` and drafter
    i mod `drafters`; more ranks of a role than `batching.batches_per_step` would idle, and are refused."""

    colocate: bool = placement(True, description="both roles in one process (one GPU, or none); needs one rank each")
    targets: int = placement(1, ge=1, unit="ranks", description="processes that compute target features")
    drafters: int = placement(1, ge=1, unit="ranks", description="processes that learn")

    @field_validator("targets", "drafters")
    @classmethod
    def _one_of_each(cls, ranks: int, info: ValidationInfo) -> int:
        if ranks > 1 and info.data.get("colocate", True):
            raise ValueError(f"{ranks} ranks need processes of their own: set `colocate: false`")
        return ranks


class TrainParams(Params):
    """`train:`"""

    target: TargetIdentity = derived()
    # the drafter
    block_size: int = keyed(16, ge=2, unit="tokens", description="tokens of a block, the anchor included")
    num_draft_layers: int = keyed(5, ge=1, unit="layers", description="layers of the drafter")
    target_layer_ids: list[int] | None = keyed(
        None, unit="layer ids", description="taps, by layer id from 0; spread over the target when left out"
    )
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = Field(
        None, description="one for each draft layer; all full when left out"
    )
    sliding_window: int | None = keyed(None, ge=1, unit="tokens", description="window of the sliding layers")
    intermediate_size: int | None = keyed(None, ge=1, description="width of the MLP; 3 x hidden size when left out")
    num_attention_heads: int | None = keyed(None, ge=1, description="hidden size / head_dim when left out")
    num_key_value_heads: int | None = keyed(None, ge=1, description="as many as attention heads when left out")
    head_dim: int = keyed(128, ge=2, description="width of a head")
    rope_theta: float = keyed(1e7, gt=0.0, description="base of the rotary embedding, plain and one-dimensional")
    rms_norm_eps: float = keyed(1e-6, gt=0.0)
    mask_token_id: int | None = keyed(None, ge=0, unit="token id", description="the target's `<|mask|>` when left out")
    # the objective
    max_anchors: int = keyed(512, ge=1, unit="anchors", description="most anchors drawn from a sample in an epoch")
    gamma: float | None = keyed(
        4.0, gt=0.0, unit="slots", description="decay of the loss along the block; null for none"
    )
    # the optimizer
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="muon for matrices, AdamW for the rest")
    lr: float = keyed(6e-4, gt=0.0, description="peak learning rate")
    warmup: int = keyed(0, ge=0, unit="steps", description="steps of linear warm-up")
    schedule_steps: int = keyed(1000, ge=1, unit="steps", description="length of the cosine schedule")
    min_lr_share: float = keyed(
        0.0, ge=0.0, le=1.0, unit="share", description="learning rate at the end, as a share of lr"
    )
    weight_decay: float = keyed(0.0, ge=0.0)
    betas: tuple[float, float] = keyed((0.9, 0.95), description="AdamW's moments")
    clip: float = keyed(1.0, gt=0.0, description="largest gradient norm")
    seed: int = Field(0, ge=0, description="seed of the weights and of the anchors")
    dtype: Dtype = Field("float32", description="compute precision; master weights are float32 (float64 with float64)")
    kernels: Kernels = Field("torch", description="linear attention kernels of the target that must be bound")
    continue_from: ContinueFrom | None = Field(None, description="start from another training's checkpoint")
    # placement
    stop_at: int | None = placement(
        None, ge=1, unit="steps", description="train up to here; schedule_steps when left out"
    )
    checkpoint_every: int = placement(
        100, ge=1, unit="steps", description="a checkpoint every so many steps, and at stop_at"
    )
    keep_states: int = placement(2, ge=1, unit="checkpoints", description="how many resumable states stay")
    topology: Topology = placement(Topology(), description="ranks by role")
    features_in_flight: int | None = placement(
        None,
        ge=1,
        unit="tokens",
        description="most tokens of features that a drafter holds or has asked for, padding counted; "
        "two batches a target when left out",
    )
    rank_timeout: int = placement(
        1800, ge=1, unit="seconds", description="a rank that makes no progress for so long ends the job, and is named"
    )
    anchor_chunk: int | None = placement(
        None, ge=1, unit="anchors", description="anchors of a forward; all when left out"
    )
    micro_batch: int | None = placement(
        None, ge=1, unit="samples", description="samples of a batch in one forward; all when left out"
    )
    activation_checkpointing: bool = placement(
        False, description="compute the drafter's activations again in the backward pass, layer by layer"
    )
    attention: Literal["sdpa", "flex"] = placement(
        "sdpa",
        description="how the drafter attends: over every pair, or with flex attention over the tiles that are seen",
    )
    fuse: bool = placement(
        False, description="compile norms, rotary positions, SwiGLU and the loss alone, for any length"
    )
    compile: bool = placement(False, description="compile the drafter, in one fixed shape a length bucket")
    logit_chunk: int = placement(4096, ge=1, unit="rows", description="rows of logits that exist at once")
    max_nonfinite: int = placement(
        3, ge=1, unit="steps", description="steps in a row with a non-finite loss that end it"
    )
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = placement(
        "none", description="where metrics go beside metrics.jsonl; needs the extra `track`"
    )

    @model_validator(mode="after")
    def _consistent(self) -> TrainParams:
        taps = self.target_layer_ids
        if taps is not None:
            if len(set(taps)) != len(taps):
                raise ValueError(f"target_layer_ids {taps} names a layer twice")
            beyond = [tap for tap in taps if not 0 <= tap < self.target.num_layers]
            if beyond:
                raise ValueError(
                    f"target_layer_ids {beyond} are beyond the target's layers 0 to {self.target.num_layers - 1}"
                )
        if self.layer_types is not None:
            if len(self.layer_types) != self.num_draft_layers:
                raise ValueError(
                    f"layer_types has {len(self.layer_types)} entries for {self.num_draft_layers} draft layers"
                )
            if "sliding_attention" in self.layer_types and self.sliding_window is None:
                raise ValueError("sliding layers need a sliding_window")
        if self.mask_token_id is not None:
            if self.mask_token_id >= self.target.vocab_size:
                raise ValueError(
                    f"mask_token_id {self.mask_token_id} is out of range: the target's vocabulary has {self.target.vocab_size}"
                )
            if self.mask_token_id in (*self.target.eos_token_ids, self.target.pad_token_id):
                raise ValueError(f"mask_token_id {self.mask_token_id} is the target's end or padding token")
        if self.compile and self.attention == "flex" and self.anchor_chunk is not None:
            raise ValueError(
                "compile cannot take flex attention in chunks of anchors: leave anchor_chunk out, or set fuse instead of compile"
            )
        if self.stop_at is not None and self.stop_at > self.schedule_steps:
            raise ValueError(
                f"stop_at {self.stop_at} is beyond schedule_steps {self.schedule_steps}; "
                "raise schedule_steps (a new training) or use continue_from"
            )
        if self.first_step() >= (self.stop_at or self.schedule_steps):
            raise ValueError(
                f"continue_from goes on after step {self.first_step()}, but training ends at step "
                f"{self.stop_at or self.schedule_steps}; raise schedule_steps or stop_at"
            )
        return self

    def first_step(self) -> int:
        """The steps done before this training begins: those of the state it continues, else 0."""
        source = self.continue_from
        return source.step if source is not None and source.what == "state" else 0

    def steps(self) -> list[int]:
        """The scheduled checkpoints, ascending: every `checkpoint_every` steps up to `stop_at`, and `stop_at` itself."""
        end = self.stop_at or self.schedule_steps
        every = {*range(self.checkpoint_every, end + 1, self.checkpoint_every), end}
        return sorted(step for step in every if step > self.first_step())
