"""Rules (rules.py) about tasks, and what cannot be set with them."""

from harness.recipe.rule import Rule

TASK_RULES: tuple[Rule, ...] = (
    Rule(
        ("dpo_reference", "task"),
        lambda r: r.dpo_reference != "computed" and not r.prefers,
        "only dpo and kto have a reference; set task: dpo, or dpo_reference: computed",
    ),
    Rule(
        ("grpo_beta", "task"),
        lambda r: r.grpo_beta > 0 and not r.rewarded,
        "only answers with rewards are kept near a reference by it; set task: grpo, or grpo_beta: 0",
    ),
    Rule(
        ("num_labels", "task"),
        lambda r: r.num_labels != 2 and r.task != "classification",
        "only a classification has classes; set task: classification, or num_labels: 2",
    ),
    Rule(
        ("task", "loss"),
        lambda r: not r.writes and r.loss != "standard",
        "what it saves are the logits of sft's loss, and the other tasks have a loss of their own; set "
        "loss: standard",
    ),
    Rule(
        ("task", "packing"),
        lambda r: not r.writes and r.packing,
        "an answer, or a text learned as a whole, is a row of its own; set packing: false, or task: sft",
    ),
    Rule(
        ("task", "data"),
        lambda r: not (r.writes or r.compares) and r.data != "synthetic",
        "no file of classes or of rewards is read yet; set data: synthetic",
    ),
    Rule(
        ("dpo_reference", "data"),
        lambda r: r.dpo_reference != "computed" and r.prefers and r.data != "synthetic",
        "a file's answers come without the reference's log-probabilities; set dpo_reference: computed",
    ),
    Rule(
        ("task", "lora_dropout"),
        lambda r: r.pairs and not r.embeds and r.lora_dropout > 0,
        "TRL turns dropout off, for two answers must differ by their tokens alone, and a model and its "
        "reference by their weights; set lora_dropout: 0",
    ),
    Rule(
        ("task", "compile"),
        lambda r: (r.by_trl or r.by_odds) and r.compile,
        "TRL computes log-probabilities beside the model, and the compiled step of that is not built here; "
        "set compile: false",
    ),
    Rule(
        ("task", "parallel"),
        lambda r: not r.writes and (r.fsdp or r.tensor_parallel),
        "no reference, no head of scores and no model without a head is divided among ranks here; set "
        "parallel: ddp, or task: sft",
    ),
    Rule(
        ("task", "offload"),
        lambda r: r.by_trl and r.parameters_on_host,
        "the head's weight is taken without calling the head, which would not be on the GPU then; "
        "set offload: [optimizer]",
    ),
)
