"""The keys of rows, messages and parts: which are read, and which say something but are not."""

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The keys under which servers, libraries and chat templates put a reply's reasoning."""

REASONING_LISTS = ("reasoning_details", "thinking_blocks")
WEIGHTS = ("weight", "train", "trainable", "loss")
"""The keys of a message that say whether a reply is trained, with 0, 1, true or false."""

RESULT_IDS = ("tool_call_id", "call_id", "tool_use_id", "tool_call_ids")
"""The keys of a result that name its call."""

READ = frozenset(
    (
        *("role", "content", "name", "tool_calls", "function_call", "refusal"),
        *(*REASONING, *REASONING_LISTS, *WEIGHTS, *RESULT_IDS),
    )
)
"""The keys of messages that are read; the others are refused if they are among these:"""

MASKS = frozenset(
    (
        *("training", "trained", "do_train", "no_train", "train_on", "train_on_turn", "learn"),
        *("mask", "masked", "is_masked", "mask_loss", "no_loss", "compute_loss", "ignore"),
        *("loss_mask", "step_loss_mask", "loss_weight", "weights", "supervised", "skip_loss"),
    )
)
TEXTS = frozenset(
    (
        *("thought", "thoughts", "analysis", "rationale", "cot", "chain_of_thought"),
        *("reasoning_text", "reasoning_summary", "thinking_content", "reasoning_steps"),
        *("function_calls", "tool_call", "tool_use", "tool_uses", "tools", "functions"),
        *("function_response", "tool_response", "tool_responses", "tool_result", "tool_results"),
        *("text", "value", "output", "parts", "recipient", "documents", "attachments", "files"),
        *("audio", "image", "images", "image_url", "video", "videos"),
    )
)

ROW_WEIGHTS = ("weight", "weights", "loss_weight", "loss_weights", "sample_weight", "trainable")
"""The keys of rows that mask nothing if they are 1 or true."""

ROW_MASKS = (
    *("loss_mask", "loss_masks", "mask", "masks", "train_mask", "assistant_mask"),
    *("assistant_masks", "train_on_last_only", "train_on_last_turn", "train_on_turns"),
    *("train_on_input", "train_on_inputs", "train_on_prompt", "mask_history", "mask_prompt"),
    *("no_loss", "masked", "ignore"),
)
"""The keys of rows that mask nothing if they are false or empty."""

ROW_TEXTS = (
    *("system", "system_prompt", "system_message", "history", "documents"),
    *("image", "images", "video", "videos", "audio", "audios"),
)

HARMLESS = frozenset(("type", "id", "index", "signature", "cache_control", "format", "status"))
"""The keys of parts that say nothing to a model."""
