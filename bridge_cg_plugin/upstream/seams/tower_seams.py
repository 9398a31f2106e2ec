"""Seams that many of Hugging Face's towers have alike. Imported when the registry is."""

from .seam import Seam, called, touched

FORWARD_OFF = "the end of training and deactivate() take the instance's own forward off"
EMBEDDINGS_READ = "the tower is found as `visual`, and its merged embeddings are all that the model reads of its result"
BLOCK_CALL = ("hidden_states", "cu_seqlens", "position_embeddings")


def layer_seams(name: str, module: str, block: str, attention: str, feature: str, *uses: str) -> tuple[Seam, Seam]:
    """Return the seams of a tower's layers, of images of any size.

    Args:
        name: Of the tower, for the seams' names.
        module: Upstream's module.
        block: The class of layers.
        attention: The class of their attention.
        feature: What does not work without them.
        uses: Code that attention must contain.
    """
    return (
        called(
            f"{name}_block",
            f"{module}:{block}.forward",
            "the layers, which hand `cu_seqlens` on to attention as they get it",
            feature,
            kind="function",
            parameters=BLOCK_CALL,
            uses=("cu_seqlens=cu_seqlens",),
        ),
        touched(
            "instance",
            f"{name}_attention",
            f"{module}:{attention}.forward",
            "attention takes segments as a tensor while work is recorded; upstream reads them on the host",
            feature,
            undo="put back when the recording ends",
            kind="function",
            parameters=BLOCK_CALL,
            uses=(*uses, "apply_rotary_pos_emb_vision(", "scaling=self.scaling", "self.proj("),
        ),
    )


def region_seams(
    name: str,
    module: str,
    tower: str,
    feature: str,
    parameters: tuple[str, ...],
    attributes: tuple[str, ...],
    uses: tuple[str, ...],
) -> tuple[Seam, Seam]:
    """Return the seams of a tower's forward, and of the parts that a region runs in its place.

    Args:
        name: Of the tower, for the seams' names.
        module: Upstream's module.
        tower: The tower's class.
        feature: What does not work without them.
        parameters: Of the forward.
        attributes: The parts.
        uses: Code that the forward must contain.
    """
    return (
        touched(
            "instance",
            f"{name}_forward",
            f"{module}:{tower}.forward",
            "a whole encoder's microbatch replays a graph, computed as here",
            feature,
            undo=FORWARD_OFF,
            kind="function",
            parameters=parameters,
            uses=uses,
        ),
        called(
            f"{name}_parts",
            f"{module}:{tower}",
            "the parts that a recorded region runs in place of the encoder's forward",
            feature,
            kind="class",
            attributes=attributes,
        ),
    )


def tower_seams(
    name: str, module: str, tower: str, feature: str, attributes: tuple[str, ...], uses: tuple[str, ...]
) -> tuple[Seam, Seam]:
    """Return the seams of a tower of images of any size; see `region_seams`."""
    return region_seams(
        name,
        module,
        tower,
        feature,
        ("hidden_states", "grid_thw"),
        ("patch_embed", "rotary_pos_emb", "blocks", "merger", *attributes),
        ("self.patch_embed(", "self.rotary_pos_emb(", "self.merger(", "pooler_output=merged_hidden_states", *uses),
    )


def rotary_seam(name: str, feature: str) -> Seam:
    """Return the seam of the function that rotates Qwen2.5-VL's queries and keys; its name is given."""
    return called(
        name,
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:apply_rotary_pos_emb_vision",
        "queries and keys are rotated by cosines and sines",
        feature,
        takes="q k cos sin",
        uses=("q * cos + rotate_half(q) * sin",),
    )
