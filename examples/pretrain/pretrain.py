"""Pretrain a small GPT from Python: a configuration, a run, its loop."""

from megatron.config.groups import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from megatron.training.loop import train
from megatron.training.pretrain import start

# Each field is the flag of the same name; a field that is not set has the flag's default.
config = Config(
    model=ModelConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
    ),
    data=DataConfig(mock_data=True, vocab_size=500, seq_length=128),
    training=TrainingConfig(micro_batch_size=2, global_batch_size=8, train_iters=20),
    optimizer=OptimizerConfig(lr=1e-2, lr_decay_style="cosine", lr_warmup_iters=2),
    evaluation=EvaluationConfig(eval_interval=10, eval_iters=1),
    checkpoint=CheckpointConfig(save="runs/example", load="runs/example", save_interval=10),
    logging=LoggingConfig(log_interval=5),
)

# Connects the ranks, builds the model and its optimizer, and loads the newest checkpoint.
with start(config) as run:
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    print(f"rank {run.groups.rank} of {run.groups.world.size} holds {parameters:,} parameters")
    ended = train(run)  # logs, evaluates and saves as the configuration asks for
    print(f"{ended.reason}: {run.progress.consumed_samples} samples consumed")
