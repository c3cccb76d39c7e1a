"""Small models of `transformers`, saved as it saves them, with their logits.

This runs in an environment with torch and transformers. Each line on stdin is a task in JSON, which
a line answers. `{"root", "configs", "logits"}` makes a directory for each config: what
`save_pretrained` writes, in many small files, and `tokens.npy` and `logits.npy` if they are asked
for. `{"load"}` has `transformers` load a directory. The answer has the keys that it misses or does
not know, and `logits.npy` is written for `tokens.npy` there.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]


def write(config: dict[str, Any], directory: Path, *, has_logits: bool) -> None:
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), attn_implementation="eager"
    )
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms are all ones or zeros, which hides mistakes
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    model.save_pretrained(directory, max_shard_size="40KB")
    if not has_logits:
        return
    tokens = torch.randint(0, config["vocab_size"], (2, 9))
    with torch.no_grad():
        logits = model(tokens).logits
    np.save(directory / "tokens.npy", tokens.numpy())
    np.save(directory / "logits.npy", logits.numpy())


def load(directory: Path) -> list[str]:
    model, about = transformers.AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager", local_files_only=True
    )
    tokens = torch.from_numpy(np.load(directory / "tokens.npy"))
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    np.save(directory / "logits.npy", logits.numpy())
    return [name for kind in about.values() for name in kind]


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for line in sys.stdin:
        task = json.loads(line)
        missed = load(Path(task["load"])) if "load" in task else []
        for name, config in task.get("configs", {}).items():
            write(config, Path(task["root"]) / name, has_logits=task["logits"])
        print(json.dumps(missed), flush=True)
