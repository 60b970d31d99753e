"""Run by an interpreter that has vLLM: samples prompts, with `dump_hook` on the model's modules.

Reads a JSON request on standard input (see `servers.vllm`), writes `rows.json` and a folder a row.
"""

import json
import sys
from pathlib import Path
from typing import Any

from consistency.layers.dump_hook import dump


def main() -> None:
    """Sample every prompt by itself."""
    from vllm import LLM, SamplingParams

    request: dict[str, Any] = json.load(sys.stdin)
    folder = Path(request["folder"])
    engine = LLM(
        model=request["model"],
        dtype=request["dtype"],
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=request["max_length"],
        skip_tokenizer_init=True,
    )
    sampling = SamplingParams(
        temperature=1.0, max_tokens=request["num_new"], ignore_eos=True, detokenize=False
    )
    model = engine.llm_engine.model_executor.driver_worker.worker.get_model()
    modules = dict(model.named_modules())
    rows = []
    for number, prompt in enumerate(request["prompts"]):
        target = folder / str(number)
        target.mkdir()
        handles = [
            modules[name].register_forward_hook(dump({"name": name, "folder": str(target)}))
            for name in request["modules"]
            if name in modules
        ]
        output = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
        rows.append([*prompt, *list(output.token_ids)[:-1]])
        for handle in handles:
            handle.remove()
    (folder / "rows.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
