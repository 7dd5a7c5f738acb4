#!/usr/bin/env bash
# From an empty folder to a trained, inspected, evaluated and exported MoE, by commands alone. Needs no GPU; some minutes
# on two cores.
#
#     bash examples/from_the_command_line.sh FOLDER
#
# Other sizes by environment variables, see below: BASE, ROWS, STEPS.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "${1:?name a folder}" && cd "$1"

# 1. Data: four kinds of short requests; and a base model, SmolLM2-135M-Instruct unless BASE names another.
read -r train test <<< "${ROWS:-300 20}" # per domain
python -m examples.demo.tasks --output data --train "$train" --test "$test"
[ -e base ] || ln -s "${BASE:-$(python -c 'from examples.demo.smollm2 import smollm2_folder; print(smollm2_folder())')}" base

# 2. A task for each domain: which of four answers belongs to the question? And how many bits do answers cost?
#    Local task files are those of lm-evaluation-harness.
mkdir -p tasks
python - << 'EOF'
import json
from pathlib import Path

rows = [json.loads(line) for line in Path("data/test.jsonl").read_text(encoding="utf-8").splitlines()]
for domain in ("numbers", "json", "sorting"):  # the reader of the harness makes timestamps of dates
    pairs = [[row[part][0]["content"] for part in ("prompt", "completion")] for row in rows if row["domain"] == domain]
    with Path(f"tasks/{domain}.jsonl").open("w", encoding="utf-8") as file:
        for i, (question, _) in enumerate(pairs):
            choices = [pairs[(i + j) % len(pairs)][1] for j in range(4)]
            answer = i % 4  # the place of the right one
            choices[0], choices[answer] = choices[answer], choices[0]
            file.write(json.dumps({"question": question, "choices": choices, "answer": answer}) + "\n")
EOF
for domain in numbers json sorting; do
    cat > "tasks/$domain.yaml" << EOF
task: short_$domain
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/$domain.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
EOF
    cat > "tasks/${domain}_text.yaml" << EOF
task: short_${domain}_text
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/$domain.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{choices[answer]}}"
metric_list:
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
EOF
done

# 3. Fine-tune a MoE-LoRA adapter with four experts.
moe-peft sft --model_name_or_path base --dataset_name data/train.jsonl --output_dir adapter --max_steps "${STEPS:-50}" \
    --num_experts 4 --top_k 2 --r 8 --learning_rate 1e-3 --per_device_train_batch_size 8 \
    --max_length 256 --bf16 false --gradient_checkpointing false --report_to none \
    --logging_steps 10 --save_strategy no

# 4. Where do its tokens go, how good is it, and how good is each expert alone?
moe-peft inspect --model adapter --data data/test.jsonl --label-column domain --output routing
python -m examples.each_expert adapter --tasks 'short_*' --include-path tasks --apply-chat-template --each-expert \
    | tee scores.txt

# 5. Export it to a native MoE, which loads without this package, and compare: the numbers are the adapter's.
[ -d exported ] || moe-peft export --adapter adapter --output exported --verify data/test.jsonl
python -m examples.each_expert exported --tasks 'short_*' --include-path tasks --apply-chat-template | tee scores-exported.txt
