"""Why a microbatch runs eager although there are graphs, what that means and what to do about it. Imports no torch."""

from enum import StrEnum


class Fallback(StrEnum):
    """A reason; equal to its word, which logs, JSON and the tags of loggers have.

    docs/errors.md has this table: `python -m tests.unit.test_error_docs` writes it.

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
        "raise `max_vision_cuda_graph_seq_length`, or add a bucket to `vision_cuda_graph_buckets`, for packs to "
        "`cuda_graph_packed_buckets`",
    )
    TOO_FEW_TOKENS = (
        "too_few_tokens",
        "it has at most `vision_cuda_graph_tuning.exact_below` tokens, a pack at most 256 on a rank, and no bucket of "
        "exactly its size",
        "add its size to `vision_cuda_graph_buckets`, for packs to `cuda_graph_packed_buckets`; or set "
        "`vision_cuda_graph_tuning.exact_below=0` and accept eager's rounding to change",
    )
    TOO_MANY_FRAMES = (
        "too_many_frames",
        "more images and video frames than `vision_cuda_graph_tuning.max_frames`, or than a deterministic kernel takes",
        "raise `vision_cuda_graph_tuning.max_frames`",
    )
    FRAME_TOO_LARGE = (
        "frame_too_large",
        "its largest frame is above the bound of every bucket that is large enough; happens in deterministic mode",
        "use smaller images, or leave deterministic mode",
    )
    TOO_MANY_DOCUMENTS = (
        "too_many_documents",
        "the pack has more documents than `cuda_graph_max_packed_seqs`",
        "raise `cuda_graph_max_packed_seqs`; `bridge-cg plan packed` says how far",
    )
    DOCUMENT_TOO_LONG = (
        "document_too_long",
        "a document is longer than `cuda_graph_packed_tuning.max_seqlen`, or, under context parallelism, what is "
        "missing to a bucket's tokens",
        "raise `cuda_graph_packed_tuning.max_seqlen`, or add a bucket nearer to the pack's size",
    )
    SHARDED_TOKENS = (
        "sharded_tokens",
        "sequence parallelism, and the pack has not exactly a bucket's tokens",
        "pad packs to one length, and make it a bucket",
    )
    EAGER_IS_FASTER = (
        "eager_is_faster",
        "a larger microbatch was measured to run faster eager than this one's bucket replays; most often the bucket is "
        "much larger than the microbatch",
        "add a bucket nearer to its size; `vision_cuda_graph_tuning.cost_fallback=False` replays all the same",
    )
    # Slots and recordings
    NO_FREE_SLOT = (
        "no_free_slot",
        "as many microbatches as there are slots are between their forward and their backward",
        "raise `vision_cuda_graph_tuning.slots`, for packs `cuda_graph_packed_tuning.slots`; each slot takes the "
        "memory of the largest bucket",
    )
    EVALUATION_NOT_CAPTURED = (
        "evaluation_not_captured",
        "evaluation with `vision_cuda_graph_tuning.evaluation=False`, for packs "
        "`cuda_graph_packed_tuning.evaluation=False`",
        "set `vision_cuda_graph_tuning.evaluation=True`, for packs `cuda_graph_packed_tuning.evaluation=True`",
    )
    MODE_NOT_CAPTURED = (
        "mode_not_captured",
        "the first microbatch in a mode that was not captured: without gradients while in training mode, with "
        "gradients in evaluation mode, or with modules in different modes",
        "none needed: the second one gets graphs",
    )
    NOT_CAPTURED_YET = (
        "not_captured_yet",
        "a recording would have to be made where none can: inside a backward, or inside another capture",
        "none needed",
    )
    NOT_CAPTURED = (
        "not_captured",
        "the region was asked for a replay while it has no recordings",
        "none needed",
    )
    CAPTURE_FAILED = (
        "capture_failed",
        "capturing failed, all of it or for this microbatch's bucket or state of the model; the warning and "
        "`not captured:` in the report say why",
        "do what the warning names",
    )
    # A model that is not what was recorded
    MODEL_CHANGED = (
        "model_changed",
        "the model is not what was captured: adapters switched off or added, a submodule replaced, an attribute set; "
        "the warning names what changed",
        "none needed: a state that is asked for a second time gets graphs of its own",
    )
    FORWARD_HOOKS = (
        "forward_hooks",
        "a forward or backward hook on a module inside the graph, or on every module; a replay would not run it, and "
        "the warning names it",
        "remove the hook; graphs go on as soon as it is gone",
    )
    PARAMETER_HOOKS = (
        "parameter_hooks",
        "somebody put a hook on a parameter; the next microbatches hand it the gradient on graphs",
        "none needed",
    )
    PARAMETERS_CHANGED = (
        "parameters_changed",
        "parameters were frozen or unfrozen since capture",
        "none needed: graphs are captured for the new set when it is asked for again",
    )
    MEMORY_MOVED = (
        "memory_moved",
        "memory of parameters or of their `main_grad` moved while another microbatch was between its forward and its "
        "backward",
        "move memory between steps; it is then captured anew at once",
    )
    AUTOCAST_CHANGED = (
        "autocast_changed",
        "autocast is on, off or of another type than at capture",
        "none needed: the second such microbatch gets graphs of its own",
    )
    NUMERICS_CHANGED = (
        "numerics_changed",
        "deterministic algorithms or the precision of fp32 matrix products are set otherwise than at capture",
        "set them as they were; graphs go on at once",
    )
    # Calls and batches of another kind
    CALL_ARGUMENTS = (
        "call_arguments",
        "a call with arguments that no graph was captured with: an encoder's `inference_params` or "
        "`extra_block_kwargs`, one of Hugging Face asked for more than its usual result, arguments of a language model "
        "or decoder, or fields of `PackedSeqParams`",
        "call it without them",
    )
    INPUT_GRADIENTS = (
        "input_gradients",
        "pixels, rotary angles or another input require a gradient that no graph returns; eager computes it",
        "pass `tensor.detach()` if nothing needs the gradient",
    )
    OTHER_BATCH = (
        "other_batch",
        "pixels and grid do not fit each other as a graph needs it, but eager takes them: images of another size where "
        "all have one, empty grid rows, one patch for a whole grid",
        "use the model's processor",
    )
    OTHER_SHAPES = (
        "other_shapes",
        "`full_iteration`: a tensor of the microbatch has another shape or type than in the last warm-up step, or is "
        "missing, as with another micro batch size in evaluation",
        "keep the micro batch size and what the dataset gives the same",
    )
    OTHER_LAYOUT = (
        "other_layout",
        "the pack has padding between documents and the packs of warm-up steps had none, or the reverse; or image "
        "features or rotary angles where those had none",
        "pack all data alike, and show warm-up steps what comes later",
    )
    UNPACKED_BATCH = (
        "unpacked_batch",
        "the batch is not packed",
        "none needed; a model that trains on unpacked data alone wants `cuda_graph_max_packed_seqs` unset",
    )
    NO_SEQ_IDX = (
        "no_seq_idx",
        "a model with Mamba layers got `PackedSeqParams` without `total_tokens`, or with those of another pack, so "
        "without `seq_idx`: eager lets states run on from one document into the next",
        "give `total_tokens`, as Bridge's steps do",
    )
