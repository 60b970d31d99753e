"""Record and replay SmolLM2-135M-Instruct on word problems, with an SGLang server on the CPU.

make demo-real                                  # the word problems in examples/
make demo-real QUESTIONS=gsm8k/test.jsonl       # GSM8K, or any JSONL with `question` and `answer`
"""

import argparse
import subprocess
import sys
from pathlib import Path

from smollm2 import prepare_smollm2

EXAMPLES = Path(__file__).parent


def main() -> int:
    """Prepare the model, train with a server, replay without one; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=Path, default=EXAMPLES / "word_problems.jsonl", help="JSONL file")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo-real"), help="new folder for everything"
    )
    parser.add_argument(
        "--model", type=Path, default=Path("runs/smollm2"), help="folder of the model; created if missing"
    )
    parser.add_argument("overrides", nargs="*", help="options of the config, such as total_train_steps=8")
    options = parser.parse_args()
    if not options.questions.is_file():
        parser.error(f"{options.questions} does not exist: give a JSONL file of questions")
    if (options.output / "record").exists():
        parser.error(f"{options.output} already contains a record: give another --output, or remove it")
    model = prepare_smollm2(options.model)
    record = options.output / "record"
    train = [
        *("train", EXAMPLES / "gsm8k_grpo.py", "--config", EXAMPLES / "gsm8k_grpo_cpu.yaml"),
        *("--dump-rollout", record, f"actor.path={model}", f"cluster.fileroot={options.output}"),
        *(f"train_dataset.path={options.questions}", *options.overrides),
    ]
    for arguments in (train, ["replay", record]):
        print("\n$ areal-debug", *arguments, flush=True)
        code = subprocess.run([Path(sys.executable).parent / "areal-debug", *map(str, arguments)]).returncode
        if code != 0:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
