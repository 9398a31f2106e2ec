"""A small model on mock images that one GPU trains in a minute, without a file from anywhere: to try things out."""

from typing import Any

from ..options import PROVIDER_FIELDS
from ..options.graph_options import SETTING
from .graphs import require_plugin

STEPS = 30
VOCABULARY = 8192
SEQUENCE = 2048
WIDTH = 1024
# Of the vision tower, whose layers are as wide as the 8B model's.
LAYERS, TOWER_WIDTH, DEEPSTACK = 8, 1152, (2, 4, 6)


def qwen3_vl_small_vision_graphs_pretrain_mock_config() -> Any:
    """Return a Bridge `ConfigContainer`: Qwen3-VL, small and with random weights, all of it on graphs.

    Raises:
        RuntimeError: The plugin is not active: upstream's own vision graphs would compute something else.
    """
    require_plugin(qwen3_vl_small_vision_graphs_pretrain_mock_config.__name__)
    from megatron.bridge.recipes.utils.optimizer_utils import distributed_fused_adam_with_cosine_annealing
    from megatron.bridge.training import config
    from megatron.core.distributed import DistributedDataParallelConfig

    from .captioned_images import PATCH_SIDE, MockImageProvider

    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(
        lr_warmup_iters=5, lr_decay_iters=STEPS, max_lr=3e-4, min_lr=3e-5
    )
    dataset = MockImageProvider(dataloader_type="single", num_workers=0, seq_length=SEQUENCE)
    largest = max(height * width for height, width in dataset.sizes)
    return config.ConfigContainer(
        model=_model(dataset.most_images * largest // PATCH_SIDE**2),
        train=config.TrainingConfig(
            train_iters=STEPS, global_batch_size=4, micro_batch_size=1, manual_gc=True, manual_gc_interval=100
        ),
        validation=config.ValidationConfig(eval_interval=None, eval_iters=0),
        optimizer=optimizer,
        scheduler=scheduler,
        ddp=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            average_in_collective=True,
            use_distributed_optimizer=True,
        ),
        dataset=dataset,
        logger=config.LoggerConfig(log_interval=5),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
        checkpoint=config.CheckpointConfig(save=None, load=None, save_interval=None, ckpt_format="torch_dist"),
        rng=config.RNGConfig(seed=1234, te_rng_tracker=True),
        dist=config.DistributedInitConfig(),
        mixed_precision="bf16_mixed",
    )


SMALL_RECIPES = {recipe.__name__: recipe for recipe in (qwen3_vl_small_vision_graphs_pretrain_mock_config,)}


def _model(longest: int) -> Any:
    """Return the provider, with vision graphs of up to `longest` patches."""
    import torch
    from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    from .captioned_images import MockImages

    tokens = MockImages.vocabulary
    graphs = {SETTING: "exact", PROVIDER_FIELDS["max_seq_length"]: longest}
    return Qwen3VLModelProvider(
        num_layers=4,
        hidden_size=WIDTH,
        ffn_hidden_size=3 * WIDTH,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=128,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=128,
        seq_length=SEQUENCE,
        language_max_sequence_length=SEQUENCE,
        vision_start_token_id=tokens.vision_start,
        vision_end_token_id=tokens.vision_end,
        image_token_id=tokens.image,
        video_token_id=tokens.image + 1,
        vision_config=Qwen3VLVisionConfig(
            depth=LAYERS, hidden_size=TOWER_WIDTH, deepstack_visual_indexes=list(DEEPSTACK), out_hidden_size=WIDTH
        ),
        out_hidden_size=WIDTH,
        gradient_accumulation_fusion=False,
        use_te_rng_tracker=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        **graphs,
    )
