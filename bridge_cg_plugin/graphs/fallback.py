"""Why a microbatch runs eager although there are graphs, what that means and what to do about it. Imports no torch."""

from enum import StrEnum


class Fallback(StrEnum):
    """A reason; equal to its word, which logs, JSON and the tags of loggers have.

    docs/trouble.md has this table: `python -m tests.unit.test_error_docs` writes it.

    Attributes:
        meaning: What is so about the microbatch, the model or the graphs.
        remedy: What the user can do about it.
    """

    meaning: str
    remedy: str

    def __new__(cls, word: str, meaning: str, remedy: str) -> "Fallback":
        """Make the member that is a word."""
        member = str.__new__(cls, word)
        member._value_ = word
        member.meaning, member.remedy = meaning, remedy
        return member

    def __repr__(self) -> str:
        return repr(self.value)  # messages show dictionaries of counts

    # Sizes
    TOO_MANY_TOKENS = (
        "too_many_tokens",
        "the microbatch is larger than the largest bucket",
        "raise `max_vision_cuda_graph_seq_length`, or add a bucket (`vision_cuda_graph_buckets`, "
        "`cuda_graph_packed_buckets`); deterministic algorithms take 4096 patches at most",
    )
    TOO_FEW_TOKENS = (
        "too_few_tokens",
        "at most `vision_cuda_graph_exact_below` tokens (packs: 256 on a rank), and no bucket of exactly this size",
        "add a bucket of this size; or set `vision_cuda_graph_exact_below=0`, which changes the rounding",
    )
    TOO_MANY_FRAMES = (
        "too_many_frames",
        "more images and video frames than `vision_cuda_graph_max_frames`, or than a deterministic kernel takes",
        "raise `vision_cuda_graph_max_frames`",
    )
    FRAME_TOO_LARGE = (
        "frame_too_large",
        "deterministic mode: the largest frame is too large for every bucket",
        "use smaller images, or leave deterministic mode",
    )
    TOO_MANY_DOCUMENTS = (
        "too_many_documents",
        "the pack has more documents than `cuda_graph_max_packed_seqs`",
        "raise it; `bridge-cg plan packed` recommends a number",
    )
    DOCUMENT_TOO_LONG = (
        "document_too_long",
        "a document is longer than a bucket takes; or, with context parallelism, the padding to the bucket is",
        "add a bucket near the pack's size",
    )
    SHARDED_TOKENS = (
        "sharded_tokens",
        "sequence parallelism, and the pack does not have exactly a bucket's tokens",
        "pad packs to one length, and add a bucket of this length",
    )
    OTHER_RANK = (
        "other_rank",
        "expert parallelism: another rank cannot replay its microbatch, so all run eager",
        "see the reasons that the other ranks count",
    )
    EXPERTS_OVERFLOW = (
        "experts_overflow",
        "more tokens went to one rank's experts than graphs have room for; the room grows before the next step",
        "none needed",
    )
    # Slots and recordings
    NO_FREE_SLOT = (
        "no_free_slot",
        "all slots hold microbatches between forward and backward",
        "raise `vision_cuda_graph_slots` or `cuda_graph_packed_slots`; each slot needs the memory of the "
        "largest bucket",
    )
    MODE_NOT_CAPTURED = (
        "mode_not_captured",
        "the first microbatch in an unusual mode: training without gradients, evaluation with gradients, or modules in "
        "different modes",
        "none needed: the second one gets graphs",
    )
    NOT_CAPTURED_YET = (
        "not_captured_yet",
        "a capture is not possible now: in a backward, in another capture, or the bucket waits for a later step",
        "none needed",
    )
    CAPTURE_FAILED = (
        "capture_failed",
        "capture failed for all or for this bucket; the warning and `not captured:` in the report give the reason",
        "do what the warning names",
    )
    LEAVES_TENSORS = (
        "leaves_tensors",
        "each forward leaves a value in an attribute or a global, which a replay would not do",
        "return it from the forward, or update a buffer in place",
    )
    DRAWS_ON_HOST = (
        "draws_on_host",
        "each forward draws random numbers on the host, which a replay would not do",
        "draw on the device with `torch`, or outside of the forward",
    )
    IN_CHECKPOINT = (
        "in_checkpoint",
        "inside a checkpoint with `use_reentrant=False`, which counts the tensors that a forward saves",
        "checkpoint only what follows, or pass `use_reentrant=True`",
    )
    DIFFERS_FROM_EAGER = (
        "differs_from_eager",
        "a replay differs from eager; after two in a row the region stays eager, and the warning names the output or "
        "parameter",
        "report it with the output of `bridge-cg doctor --details --json`",
    )
    # A model that is not what was recorded
    OWN_CODE = (
        "own_code",
        "other code wraps, patches or overrides a function of upstream that a graph computes in its own way; the "
        "warning names it",
        "remove it, put it into a module that the encoder or its layers call, or leave that part out of the graph",
    )
    MODEL_CHANGED = (
        "model_changed",
        "adapters, a submodule, an attribute, or quantized weights or scales of fp8 changed; the warning names it",
        "none needed: the second microbatch in this state gets graphs; in fp8 put them back, or capture again",
    )
    FORWARD_HOOKS = (
        "forward_hooks",
        "a module inside the graph has a forward or backward hook, which a replay would not run; the warning names it",
        "remove the hook; graphs then continue",
    )
    PARAMETERS_CHANGED = (
        "parameters_changed",
        "parameters were frozen or unfrozen after capture, or got a hook",
        "none needed: the second microbatch in this state gets graphs",
    )
    MEMORY_MOVED = (
        "memory_moved",
        "memory of parameters or of their `main_grad` moved while another microbatch was between forward and backward",
        "move memory between steps",
    )
    GRADIENTS_LEFT = (
        "gradients_left",
        "memory of `main_grad` has left the device, and the microbatch runs with gradients on",
        "load the gradients, or compute log-probabilities under `torch.no_grad()`",
    )
    MEMORY_RELEASED = (
        "memory_released",
        "the graphs' memory left the device between steps, and there is too little to take it back",
        "free memory before the step; the next one tries again",
    )
    AUTOCAST_CHANGED = (
        "autocast_changed",
        "autocast differs from the capture",
        "none needed: the second such microbatch gets graphs",
    )
    NUMERICS_CHANGED = (
        "numerics_changed",
        "deterministic algorithms, fp32 precision or parameters' types differ from the capture",
        "none needed for another precision: the second such microbatch gets graphs; set the others as at capture",
    )
    # Calls and batches of another kind
    CALL_ARGUMENTS = (
        "call_arguments",
        "the call has arguments that no graph was captured with, such as `inference_params`, `extra_block_kwargs` or "
        "fields of `PackedSeqParams`",
        "call it without them",
    )
    INPUT_GRADIENTS = (
        "input_gradients",
        "an input requires a gradient that no graph returns",
        "pass `tensor.detach()` if nothing needs the gradient",
    )
    OTHER_BATCH = (
        "other_batch",
        "only eager takes these pixels and grid, such as empty grid rows, or audio clips that are all shorter than a "
        "chunk",
        "use the model's processor",
    )
    OTHER_SHAPES = (
        "other_shapes",
        "`full_iteration`: the microbatch has another shape than the eight that are captured at most",
        "use one micro batch size",
    )
    OTHER_LAYOUT = (
        "other_layout",
        "padding between documents, image features or rotary angles differ from the packs of warm-up steps",
        "pack all data alike, and include every kind in warm-up steps",
    )
    UNPACKED_BATCH = (
        "unpacked_batch",
        "the batch is not packed",
        "none needed; if all data is unpacked, unset `cuda_graph_max_packed_seqs`",
    )
    NO_SEQ_IDX = (
        "no_seq_idx",
        "Mamba layers got `PackedSeqParams` without `seq_idx`: `total_tokens` is missing or of another pack",
        "give `total_tokens`, as Bridge's steps do",
    )
