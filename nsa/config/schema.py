"""The typed config tree: groups, keys, defaults, and rejected combinations.

The string under each field is its documentation: `nsa keys` and docs/configuration.md print it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePath

from nsa.config.check import (
    at_least,
    between,
    count_ids,
    divides,
    finite_positive,
    nearest,
    ok_layers,
    one_of,
    refuse,
)

ATTENTIONS = ("nsa", "dense")
RULES = ("nsa", "pooled", "msa", "reuse", "dense")
KVS = ("separate", "shared")
MLPS = ("plain", "gated")
ROPE_SCALINGS = ("linear", "llama3", "yarn")
INDEX_WARMUPS = ("joint", "frozen")
POOLS = ("infllm", "moba")
PHIS = ("avg", "mlp")
GATES = ("softmax", "sigmoid")
SPIKE_RULES = ("off", "log", "skip", "rollback")
# Allowed words; nsa/config/check.py makes the error that lists them.
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "constant", "wsd")
TRACKERS = ("none", "wandb", "trackio")
DATASETS = (
    "shakespeare",
    "synthetic",
    "synthetic_copy",
    "fineweb_edu_local",
    "shards",
    "fineweb_edu",
)
MADE_DATASETS = ("synthetic", "synthetic_copy")
"""Synthetic datasets, generated row by row."""
LOCAL_DATASETS = ("fineweb_edu_local", "shards")
"""Datasets read from data.local_path."""
TOKENIZERS = ("byte", "gpt2", "hf")
VOCABULARIES = {"byte": 256, "gpt2": 50257}
"""Vocabulary size of the fixed tokenizers; never padded."""
STRATEGIES = ("auto", "ddp", "fsdp")
PRECISIONS = ("fp32", "bf16", "fp16")
BACKENDS = ("auto", "reference", "torch", "triton")
MLP_RATIO = 4
"""Width of the MLP, as a multiple of the model dim, unless model.mlp_dim gives it."""
BLOCK_STEP, MAX_BLOCK = 16, 256
"""Blocks of nsa.sparse_attention: a multiple of the first, up to the second."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The size of the language model."""

    dim: int = 2560
    """Width of the residual stream."""
    n_layers: int = 30
    """Number of blocks (attention, then MLP)."""
    n_heads: int = 64
    """Query heads."""
    n_kv_groups: int = 4
    """Key/value heads. n_heads / n_kv_groups query heads share one and select the same blocks."""
    d_k: int = 192
    """Dimension of a query or key head; even, because RoPE rotates halves."""
    d_v: int = 128
    """Dimension of a value head; may differ from d_k."""
    mlp_dim: int = 0
    """Width of the MLP between its two layers; 0: 4 * dim."""
    mlp: str = "plain"
    """plain: fc2(silu(fc1 x)), or gated: fc2(silu(gate x) * fc1 x), as in Llama."""
    norm_eps: float = 1.0e-6
    """Added to the mean square in every RMSNorm."""
    qkv_bias: bool = False
    """Biases of the projections to q, k and v, as in Qwen2."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before RoPE, as in Qwen3."""
    attention: str = "nsa"
    """nsa, or dense: full causal attention for comparison, which ignores group nsa."""
    rule: str = "nsa"
    """nsa, pooled, msa, reuse, or dense: all blocks. A list, as msa,reuse, repeats over layers."""
    kv: str = "separate"
    """K and V of nsa layers: separate for each branch, or shared: one, and no gates."""
    tie_embeddings: bool = False
    """Share one matrix between embedding and output head; saves vocab * dim parameters."""
    embed_std: float = 0.02
    """Initial std of the embedding; a tied model of dim 64 learns to copy sooner with 0.2."""
    rope_base: float = 10000.0
    """Base of the RoPE frequencies; a larger one rotates slower, for longer contexts."""
    rope_scale: float = 1.0
    """RoPE positions are divided by this, for contexts longer than in training."""
    rope_scaling: str = "linear"
    """What rope_scale divides: linear: all positions; llama3, yarn: only what rotates slowly."""
    rope_original_len: int = 8192
    """llama3, yarn: tokens of the context before it was stretched."""
    rope_low_freq: float = 1.0
    """llama3, yarn: pairs with at most so many turns in that context are scaled."""
    rope_high_freq: float = 4.0
    """llama3, yarn: pairs with at least so many turns are not; 32 is usual for yarn."""

    def __post_init__(self) -> None:
        # Rules within a group stand here; rules between groups are in Config.__post_init__.
        at_least(1, self, "model", "dim", "n_layers", "n_heads", "n_kv_groups", "d_k", "d_v")
        at_least(0, self, "model", "mlp_dim")
        one_of("model.attention", self.attention, ATTENTIONS)
        one_of("model.kv", self.kv, KVS)
        self._check_rules()
        one_of("model.mlp", self.mlp, MLPS)
        finite_positive(self, "model", "embed_std", "norm_eps")
        self._check_positions()
        divides("model.n_kv_groups", self.n_kv_groups, "model.n_heads", self.n_heads)
        if self.d_k % 2:
            refuse("model.d_k", self.d_k, "an even number", "RoPE rotates the two halves of a head")

    def _check_positions(self) -> None:
        one_of("model.rope_scaling", self.rope_scaling, ROPE_SCALINGS)
        at_least(1, self, "model", "rope_original_len")
        finite_positive(self, "model", "rope_base", "rope_scale", "rope_low_freq", "rope_high_freq")
        if self.rope_high_freq <= self.rope_low_freq:
            allowed = f"more than model.rope_low_freq={self.rope_low_freq:g}"
            refuse("model.rope_high_freq", self.rope_high_freq, allowed, "change one of them")

    def _check_rules(self) -> None:
        for rule in self.rules:
            one_of("model.rule", rule, RULES)
        # The index of a layer with branches stays inside its kernels.
        for before, rule in pairwise(["", *self.rules]):
            has_index = before not in ("", "dense") and (before != "nsa" or self.kv == "shared")
            if rule == "reuse" and not has_index:
                allowed = "reuse after pooled, msa or reuse, or after nsa with model.kv=shared"
                refuse("model.rule", self.rule, allowed, "give that layer a rule of its own")

    @property
    def mlp_width(self) -> int:
        """Width of the MLP, as built."""
        return self.mlp_dim or MLP_RATIO * self.dim

    @property
    def rules(self) -> list[str]:
        """The rules of the first layers, which repeat over the others."""
        return [name.strip() for name in self.rule.split(",")][: self.n_layers]

    @property
    def branched(self) -> list[bool]:
        """For each of `rules`: whether its layers have the branches of NSA, with gates."""
        is_nsa, separate = self.attention == "nsa", self.kv == "separate"
        return [is_nsa and separate and rule == "nsa" for rule in self.rules]

    @property
    def chosen(self) -> list[bool]:
        """For each of `rules`: whether its layers choose blocks of one K and V."""
        pairs = zip(self.rules, self.branched, strict=True)
        is_nsa = self.attention == "nsa"
        return [is_nsa and rule != "dense" and not branched for rule, branched in pairs]

    @property
    def attention_kind(self) -> str:
        """dense, nsa, or the rules of layers with one K and V."""
        if self.attention == "dense" or all(self.branched):
            return self.attention
        if not any(self.branched) and not any(self.chosen):
            return "dense"
        return f"rule {self.rule}, K and V {self.kv if any(self.branched) else 'shared'}"

    @property
    def learns_index(self) -> bool:
        """Whether a layer has an indexer to train."""
        return self.attention == "nsa" and "msa" in self.rules


@dataclass(frozen=True, kw_only=True)
class NSAConfig:
    """Block sizes of Native Sparse Attention, in the paper's letters."""

    l: int = 32
    """Length of a compression block, in tokens."""
    d: int = 16
    """Stride of the compression blocks, in tokens; divides l and l_sel."""
    l_sel: int = 64
    """Length of a selection block, in tokens."""
    n_sel: int = 16
    """Selection blocks per query, the forced ones included."""
    w: int = 512
    """Length of the sliding window, in tokens."""
    phi: str = "avg"
    """Compression of a block: avg is the mean; mlp is learned, as in the paper."""
    gate: str = "softmax"
    """Branch weights: softmax over the three branches, or a sigmoid each, as in the paper."""
    num_first: int = 1
    """Blocks at the start of the sequence that every query reads."""
    num_local: int = 2
    """Blocks up to its own that every query reads; its own is one of them."""
    pool: str = "infllm"
    """Rule pooled: infllm (softmax over means of l keys), or moba (mean key of a large block)."""
    pool_block: int = 512
    """Rule pooled with pool=moba: tokens of a large block; it ignores num_first and num_local."""
    d_index: int = 64
    """Rule msa: dimension of an index head; even."""

    def __post_init__(self) -> None:
        at_least(1, self, "nsa", "l", "d", "l_sel", "w", "num_local", "pool_block")
        at_least(0, self, "nsa", "num_first")
        at_least(self.num_first + self.num_local, self, "nsa", "n_sel")
        at_least(2, self, "nsa", "d_index")
        one_of("nsa.pool", self.pool, POOLS)
        if self.d_index % 2:
            refuse("nsa.d_index", self.d_index, "an even number", "RoPE rotates two halves")
        divides("nsa.d", self.d, "nsa.l", self.l)
        divides("nsa.d", self.d, "nsa.l_sel", self.l_sel)
        one_of("nsa.phi", self.phi, PHIS)
        one_of("nsa.gate", self.gate, GATES)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run: its length, optimization, logging and checkpoints."""

    steps: int = 1000
    """Number of optimizer updates; also the horizon of the learning-rate schedule."""
    seq_len: int = 8192
    """Input tokens per row; a row has one more token, as the last target."""
    batch_size: int = 1
    """Rows per micro-batch and rank."""
    accumulate_grad_batches: int = 1
    """Micro-batches per optimizer update: a larger batch in the same memory."""
    optimizer: str = "adamw"
    """adamw, or muon: Muon for the linear layers of the blocks, AdamW for the rest."""
    lr: float = 2.0e-4
    """Peak learning rate."""
    lr_schedule: str = "cosine"
    """After the warm-up: cosine decays to the end, constant stays, wsd decays in the last steps."""
    warmup_steps: int = 0
    """Updates of linear warm-up, while Adam's moment estimates are still noisy."""
    decay_steps: int = 0
    """Updates of the final decay to zero with wsd; 0: a fifth of the steps."""
    weight_decay: float = 0.01
    """Decoupled weight decay, times the learning rate. None on embeddings, norms and biases."""
    grad_clip: float = 1.0
    """Gradient norm limit; 0: no clipping."""
    spike_rule: str = "log"
    """On a loss spike: off, log it, skip the update, or rollback to a checkpoint."""
    spike_threshold: float = 8.0
    """Loss spike: this many robust standard deviations above the median of recent losses."""
    spike_window: int = 64
    """Number of recent losses used; until there are so many, nothing is a spike."""
    log_every: int = 20
    """Updates between two lines in the log and in training.csv."""
    eval_every: int = 1000
    """Updates between two evaluations on held-out text; 0: never."""
    eval_batches: int = 8
    """Micro-batches per evaluation and rank."""
    save_every: int = 0
    """Updates between two checkpoints; 0: only when the run is asked to stop."""
    keep_last: int = 5
    """Number of newest checkpoints to keep; 0: all."""
    backup_dir: str = ""
    """Another folder that gets a verified copy of every checkpoint; empty: none."""
    tracker: str = "none"
    """Also log to wandb or trackio (install the extra of that name), or none."""
    index_loss: float = 1.0
    """Rule msa: weight of the indexer's KL loss beside the loss."""
    index_lr: float = 0.0
    """Rule msa: peak learning rate of the indexer, with the schedule of the others; 0: theirs."""
    index_warmup_steps: int = 0
    """Rule msa: updates in which all blocks are read, so that the indexer learns from dense."""
    index_warmup: str = "joint"
    """What learns in these updates: joint: everything, or frozen: the indexer alone."""
    init_from: str = ""
    """Initial weights of a new run: model.pt, checkpoint, run or model folder; empty: random."""
    seed: int = 1337
    """Seed of the initial weights and of the data order."""
    out_dir: str = "artifacts/base"
    """Run folder: everything that the run writes."""

    def __post_init__(self) -> None:
        counts = ("steps", "seq_len", "batch_size", "accumulate_grad_batches")
        at_least(1, self, "train", *counts, "log_every", "eval_batches")
        at_least(
            0,
            self,
            "train",
            "warmup_steps",
            "decay_steps",
            "eval_every",
            "save_every",
            "keep_last",
            "seed",
            "index_warmup_steps",
        )
        finite_positive(self, "train", "lr", "index_loss")
        between(0.0, 1.0, self, "train", "weight_decay")
        between(0.0, 1e9, self, "train", "grad_clip", "index_lr")
        one_of("train.optimizer", self.optimizer, OPTIMIZERS)
        one_of("train.index_warmup", self.index_warmup, INDEX_WARMUPS)
        self._check_spikes()
        one_of("train.lr_schedule", self.lr_schedule, SCHEDULES)
        one_of("train.tracker", self.tracker, TRACKERS)
        if self.warmup_steps > self.steps:
            todo = "shorten the warm-up or lengthen the run"
            refuse("train.warmup_steps", self.warmup_steps, f"at most steps={self.steps}", todo)
        if self.warmup_steps + self.decay_steps > self.steps:
            allowed = f"at most steps - warmup_steps = {self.steps - self.warmup_steps}"
            refuse("train.decay_steps", self.decay_steps, allowed, "shorten it")
        if not self.out_dir.strip():
            refuse("train.out_dir", self.out_dir, "the name of a folder", "name one")
        if self.backup_dir and self.backup_dir.rstrip("/") == self.out_dir.rstrip("/"):
            allowed = "another folder than train.out_dir"
            refuse("train.backup_dir", self.backup_dir, allowed, "name one on another disk")
        # A new run moves the old files of out_dir away, including the weights to start from.
        start = PurePath(self.init_from)
        if self.init_from and PurePath(self.out_dir) in (start, start.parent):
            allowed = "outside train.out_dir, whose files a new run moves aside"
            refuse("train.init_from", self.init_from, allowed, "name another train.out_dir")

    def _check_spikes(self) -> None:
        one_of("train.spike_rule", self.spike_rule, SPIKE_RULES)
        finite_positive(self, "train", "spike_threshold")
        at_least(4, self, "train", "spike_window")
        # A rollback needs a checkpoint to go back to.
        if self.spike_rule == "rollback" and self.save_every == 0:
            allowed = "off, log or skip with save_every=0"
            refuse("train.spike_rule", self.spike_rule, allowed, "set train.save_every")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data source and tokenizer."""

    dataset: str = "synthetic"
    """shakespeare, synthetic, synthetic_copy, fineweb_edu_local, shards, fineweb_edu (streamed)."""
    local_path: str = ""
    """fineweb_edu_local: a .jsonl, .txt or .parquet file, or a folder of them. shards: a folder."""
    hub_dataset: str = "HuggingFaceFW/fineweb-edu"
    """fineweb_edu: dataset on the Hugging Face Hub; reads `text` of the split train."""
    hub_subset: str = ""
    """fineweb_edu: a subset, such as sample-10BT; empty: the dataset's default, everything."""
    hub_revision: str = ""
    """fineweb_edu: a branch, tag or commit, fixed for the run; empty: the newest commit."""
    tokenizer: str = "byte"
    """byte (256 ids), gpt2 (50257), hf, or the path of a tokenizer.json."""
    tokenizer_path: str = ""
    """hf: the tokenizer.json. gpt2: a folder with its vocabulary files; empty: from tiktoken."""
    eos: str = ""
    """EOS token of a tokenizer.json, if it has an unusual name."""
    respect_documents: bool = False
    """Keep attention and positions inside a document; false: rows attend across documents."""

    def __post_init__(self) -> None:
        one_of("data.dataset", self.dataset, DATASETS)
        self._check_tokenizer()
        if self.local_path and self.dataset not in LOCAL_DATASETS:
            todo = f"leave it empty, or choose data.dataset {' or '.join(LOCAL_DATASETS)}"
            refuse("data.local_path", self.local_path, f"empty for {self.dataset}", todo)
        if not self.local_path and self.dataset in LOCAL_DATASETS:
            allowed = f"a file or folder for data.dataset={self.dataset}"
            refuse("data.local_path", self.local_path, allowed, "name one")
        if self.respect_documents and self.dataset in MADE_DATASETS:
            allowed = f"false for data.dataset={self.dataset}, which has no documents"
            refuse("data.respect_documents", True, allowed, "choose another dataset")
        for key in ("hub_subset", "hub_revision"):
            if getattr(self, key) and self.dataset != "fineweb_edu":
                todo = "leave it empty, or choose data.dataset fineweb_edu"
                refuse(f"data.{key}", getattr(self, key), f"empty for {self.dataset}", todo)
        if not HUB_NAME.fullmatch(self.hub_dataset):
            refuse("data.hub_dataset", self.hub_dataset, "NAMESPACE/NAME", "name one on the hub")

    def _check_tokenizer(self) -> None:
        if self.tokenizer not in TOKENIZERS and not self.tokenizer.endswith(".json"):
            allowed = f"{' | '.join(TOKENIZERS)} | the path of a tokenizer.json"
            todo = f"the nearest is {nearest(self.tokenizer, TOKENIZERS)!r}"
            refuse("data.tokenizer", self.tokenizer, allowed, todo)
        if self.tokenizer == "hf" and not self.tokenizer_path:
            refuse("data.tokenizer_path", "", "a tokenizer.json for data.tokenizer=hf", "name it")
        if self.tokenizer_path and self.tokenizer not in ("gpt2", "hf"):
            allowed = f"empty for data.tokenizer={self.tokenizer}"
            refuse("data.tokenizer_path", self.tokenizer_path, allowed, "leave it empty")
        if self.eos and self.tokenizer in VOCABULARIES:
            allowed = f"empty for data.tokenizer={self.tokenizer}, which has its own"
            refuse("data.eos", self.eos, allowed, "leave it empty")

    @property
    def tokenizer_file(self) -> Path:
        """Path of the tokenizer.json, for tokenizers that are one."""
        return Path(self.tokenizer_path if self.tokenizer == "hf" else self.tokenizer)

    @property
    def vocab(self) -> int:
        """Vocabulary size; for a tokenizer.json read from the file."""
        return VOCABULARIES.get(self.tokenizer) or count_ids(self.tokenizer_file)


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Device, precision and kernels; none of them changes the mathematics."""

    device: str = "auto"
    """cpu, cuda or cuda:N; auto: a GPU if there is one."""
    precision: str = "bf16"
    """fp32, bf16, or fp16 with loss scaling. Weights and optimizer are always fp32."""
    use_flash: bool = True
    """false: torch backend and math-only SDPA, to rule out fused kernels."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, more time."""
    gc_layers: str = ""
    """A:B checkpoints only layers A to B-1; empty: all layers."""
    backend: str = "auto"
    """reference, torch or triton: run or raise. auto: the best that runs here."""
    cuda_graph: bool = False
    """Replay every update as one CUDA graph, so that small models do not wait for the host."""
    compile: bool = False
    """torch.compile for the blocks in training: a slower first step, then faster ones."""
    deterministic: bool = False
    """Deterministic sums: GPU runs repeat and resume bit for bit, but slower."""
    strategy: str = "auto"
    """With several ranks: ddp (a replica on each) or fsdp (a shard on each); auto: ddp."""
    cp: int = 1
    """Context parallel: ranks that share each row, with a part of its tokens each."""
    tp: int = 1
    """Tensor parallel: ranks that share each matrix, by KV head; at most n_kv_groups."""

    def __post_init__(self) -> None:
        at_least(1, self, "runtime", "cp", "tp")
        one_of("runtime.precision", self.precision, PRECISIONS)
        one_of("runtime.backend", self.backend, BACKENDS)
        one_of("runtime.strategy", self.strategy, STRATEGIES)
        if not DEVICE.fullmatch(self.device):
            refuse("runtime.device", self.device, "auto, cpu, cuda or cuda:N", "choose one")
        if self.gc_layers and not self.gradient_checkpointing:
            todo = "set runtime.gradient_checkpointing=true, or leave gc_layers empty"
            refuse("runtime.gc_layers", self.gc_layers, "layers only with checkpointing on", todo)
        if self.compile and self.backend == "reference":
            allowed = "false for runtime.backend=reference, which looks at its numbers"
            refuse("runtime.compile", True, allowed, "choose another backend")
        if not self.use_flash and self.backend not in ("auto", "torch"):
            todo = "set runtime.use_flash=true, or choose backend torch"
            refuse("runtime.backend", self.backend, "auto or torch when use_flash=false", todo)
        if self.tp > 1 and self.strategy == "ddp":
            allowed = f"auto or fsdp for runtime.tp={self.tp}: DDP has whole matrices on each rank"
            refuse("runtime.strategy", "ddp", allowed, "change one of them")
        if self.cuda_graph and self.sharing > 1:
            allowed = f"false with runtime.cp={self.cp}, runtime.tp={self.tp}: ranks exchange "
            refuse("runtime.cuda_graph", True, allowed + "tokens in a pass", "set it to false")

    @property
    def sharing(self) -> int:
        """Ranks that compute the same rows together."""
        return self.cp * self.tp

    @property
    def attention_backend(self) -> str:
        """The backend requested by the model: use_flash=false turns auto into torch."""
        return self.backend if self.use_flash else "torch"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole tree. Defaults are the paper's model; configs/base.yaml states the same."""

    model: ModelConfig = field(default_factory=ModelConfig)
    nsa: NSAConfig = field(default_factory=NSAConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        if self.runtime.gc_layers:
            ok_layers("runtime.gc_layers", self.runtime.gc_layers, self.model.n_layers)
        if self.model.attention == "dense" and self.runtime.backend not in ("auto", "torch"):
            todo = "set runtime.backend=auto, or model.attention=nsa"
            allowed = "auto or torch for model.attention=dense, which is torch's own"
            refuse("runtime.backend", self.runtime.backend, allowed, todo)
        if self.train.index_warmup == "frozen" and not self.model.learns_index:
            allowed = f"joint for model.rule={self.model.rule}, which has no indexer"
            refuse("train.index_warmup", "frozen", allowed, "leave it out, or use model.rule=msa")
        if self.train.index_lr and not self.model.learns_index:
            allowed = f"0 for model.rule={self.model.rule}, which has no indexer"
            todo = "leave it out, or use model.rule=msa"
            refuse("train.index_lr", self.train.index_lr, allowed, todo)
        self._check_sparse()
        self._check_split()
        if self.runtime.cuda_graph:
            self._check_graph()
        if self.runtime.compile and self.data.respect_documents:
            allowed = "false with data.respect_documents=true: each batch would be compiled anew"
            refuse("runtime.compile", True, allowed, "turn one of them off")

    def _check_sparse(self) -> None:
        """Layers with one K and V read their blocks through sparse_attention."""
        if not any(self.model.chosen):
            return
        rule, nsa = f"model.rule={self.model.rule}, model.kv={self.model.kv}", self.nsa
        if nsa.l_sel % BLOCK_STEP or nsa.l_sel > MAX_BLOCK:
            allowed = f"a multiple of {BLOCK_STEP} up to {MAX_BLOCK} with {rule}"
            refuse("nsa.l_sel", nsa.l_sel, allowed, "change one of them")
        if "pooled" in self.model.rules and nsa.pool == "moba":
            divides("nsa.l_sel", nsa.l_sel, "nsa.pool_block", nsa.pool_block)
            if nsa.n_sel * nsa.l_sel % nsa.pool_block:
                allowed = f"a divisor of n_sel * l_sel = {nsa.n_sel * nsa.l_sel} tokens"
                refuse("nsa.pool_block", nsa.pool_block, allowed, "or change nsa.n_sel")

    def _check_split(self) -> None:
        """Rows and matrices go to the ranks in equal parts."""
        cp, tp, seq_len = self.runtime.cp, self.runtime.tp, self.train.seq_len
        if cp > 1 and seq_len % (2 * cp):
            lower = seq_len // (2 * cp) * 2 * cp
            near = f"use {lower} or {lower + 2 * cp}" if lower else f"use {2 * cp}"
            allowed = f"a multiple of {2 * cp} with runtime.cp={cp}: each rank has two equal parts"
            refuse("train.seq_len", seq_len, allowed, f"{near}, or another runtime.cp")
        if self.model.n_kv_groups % tp:
            allowed = f"a divisor of model.n_kv_groups={self.model.n_kv_groups}: each rank has"
            todo = "use fewer ranks, and more by runtime.cp or data parallelism"
            refuse("runtime.tp", tp, f"{allowed} whole KV heads", todo)

    def _check_graph(self) -> None:
        # A CUDA graph replays fixed shapes and cannot branch on values on the host.
        obstacles = (
            (self.runtime.precision == "fp16", "runtime.precision=fp16: the host scales its loss"),
            (self.runtime.backend == "reference", "runtime.backend=reference"),
            (self.data.respect_documents, "data.respect_documents=true: the borders change"),
            (
                any(self.model.chosen),
                f"model.rule={self.model.rule}, model.kv={self.model.kv}",
            ),
        )
        for there, what in obstacles:
            if there:
                refuse("runtime.cuda_graph", True, f"false with {what}", "change one of them")
