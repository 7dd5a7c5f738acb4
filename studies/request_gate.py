"""
One gate for a request: which LoRA answers, and whether any should. SmolLM2-135M-Instruct.

    python -m studies.short_tasks --source FOLDER --output .cache/short_tasks
    python -m studies.request_gate run --source FOLDER [--workers 2]   # resumes where the ledger ends
    python -m studies.request_gate report                              # tables, in studies/results

Fixed before the first run. Two sets of tasks, with a LoRA of rank 8 on the FFNs for each task (60 steps of 8 rows, a
rate that decays from 1e-3): *short*, four of the short tasks, which their prompts tell apart (100 held-out rows each);
and *domains*, eight look-alike domains of clinc150 (60 held-out rows each). Three seeds, of the trainings and of the
rows that set gates: 24 of each task, and all that a task has been trained on (150 and 240). No row that sets a gate is
held out. Measured: right answers (greedy decoding gives the answer exactly), loss per answer token, the share of rows
whose choice is their own task, and *harm*: on 64 general texts of kinds that no gate has seen (word problems, code,
quizzes, yes-no questions of other data sets), the loss per token above the base's, and the share sent to the base.

A gate is ridge regression, from the inputs of the FFNs to the expert whose text it is:

- *tokens*: as `moe-peft mix` sets gates today, of all tokens of a row, λ = 0.01, columns of norm 1;
- *prompts*: of the mean over the tokens of a row's prompt, one row a text, classes of equal weight, λ = 0.1; with
  *base*, one class more, of 190 general texts of our own (`moe_peft/combine/neutral.txt`), which has no update.

Ways to use it:

- *token*: every token in every layer goes where its own score is largest (today);
- *text so far*: … where the mean of the scores of the tokens up to it is largest; *over layers*: summed over the
  routers so far; *first eight*: so, and from the eighth router on as that one has it; *when sure*: summed over layers,
  and the base until the best score of the mean is 0.2 above the second;
- *picked*: one LoRA for the row, by the mean over its prompt: *today* of softmaxes of the gates *tokens* in all layers;
  else of the scores of *prompts* in the first eight layers, or in all;
- *own*, the *mean* of the LoRAs, and the *base*.

What decides: a scope other than *token* is built for users if it has more right answers than *token* with the same
rows on both sets (the interval over rows and seeds excludes 0) and is at most 2 points below *picked*.

Predictions.

1. *Picked* of *prompts* from eight layers chooses as well as from all (within 2 points), and on *domains* with all rows
   at least 90 % right; its right answers are then more than 0.85 of what *own* has.
2. It beats *picked* as today on *domains* with all rows, and does not differ on *short*.
3. *Token* from *prompts* has as many right answers as *token* from *tokens* (within 2 points): a gate can be set from
   one vector a text.
4. *Text so far, over layers* beats *token* on both sets, is within 2 points of *picked* on *short*, and is more than 2
   points below it on *domains*. *First eight* is level with it; *when sure* is worse on both.
5. *Base* costs *picked* at most 1 point of right answers with all rows and up to 3 with 24. Harm: *token* without it
   more than 0.3 above the base's loss; *picked* with it less than 0.05, and 90 % of general texts go to the base.
6. *Base* in *token* scope takes away at least half of its harm and costs up to 3 points of right answers.
"""
