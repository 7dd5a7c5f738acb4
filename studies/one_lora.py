"""
One LoRA out of several: SmolLM2-135M-Instruct and the LoRAs of short tasks and of look-alike domains.

    python -m studies.one_lora run --source FOLDER [--workers 2]   # about three hours of a CPU core a seed of both sets
    python -m studies.one_lora report                              # tables, in studies/results

Fixed before the first run. Sets, rows, LoRAs and their training are those of `studies.requests` (*short*: four tasks,
*domains*: eight look-alike domains of clinc150; rank 8, 60 steps of 8 rows), with seeds of their own, 10 to 12. The base
is that study's, too: SmolLM2 out of a file of four bits, and back.

What a way may use: the LoRAs, *prompts* of each task that no LoRA was trained on (24, 100 or 240; of *logic* those that
are left), and the 174 general texts of the package. Gold answers are for the upper end alone.

Ways:

- *own* LoRA (who knows the task), the *base*, the *mean* of the LoRAs, *picked* by `RequestGate` from 24 or 240 of the
  prompts;
- *regmean*: the least-squares merge (Jin et al., arXiv 2212.09849), a LoRA of rank 8·n without training, from 24, 100
  and 240 prompts of each task with the LoRA's own greedy answers, each LoRA reading its own inputs, and the general
  texts in the sum; *without base*: without these; *base inputs*: the inputs of the base alone (240 prompts);
- *distilled*: one LoRA of rank 16 and of 8·n, trained for 120 steps of 10 rows, 8 of the prompts with their LoRA's
  greedy answers and 2 of the general texts with the base's (cross-entropy, rate 1e-3, cosine), from 24, 100 and 240
  prompts; *KL*: the same rows with the teacher's distribution in place of the answers' tokens (240, rank 16);
  *two writings*: half of the prompts as sentences (240, rank 16); *from regmean*: begins with the merge (240, rank 8·n,
  60 steps);
- *joint*: one LoRA of rank 16 on the gold rows that the LoRAs were trained on, with the same general rows and as many
  steps as *distilled*.

Requests, of held-out rows (40 of a task in *short*, 30 in *domains*): *one*, as in the data; *sentence*: with a capital
and a mark; *switch*: the second turn of a chat whose first is another task's row with its right answer. Of none of the
tasks: *none*, the 64 general requests of `studies.requests`, and 100 of clinc150's out-of-scope test set (*far*).

Right answers decide: greedy decoding gives the answer exactly. Of *none* the loss per token of the base's own greedy
answers, above the base's (*harm*). Of *far* the share whose greedy answer is an answer of some task's training rows
(*labels*).

The primary contrast: *distilled* (240, rank 16) − *own*, requests as in the data. Differences are over rows, paired,
the three seeds together; a set has 480 and 720.

Predictions, means over seeds.

1. *Distilled* (240, rank 16) is within 2 points of *own* on both sets, *one*.
2. With 24 prompts it loses 10 points or more of that, and is not above *picked* (24).
3. *Regmean* (240) has at least nine tenths of *own* on *short*, two thirds on *domains*, and 15 points or more above the
   *mean* on both; with 24 prompts it loses less than 5 points.
4. Without the base's sums its harm at least doubles; base inputs lose less than 3 points.
5. *KL* is within 2 points of *distilled*; *from regmean* within 2 points, in half of the steps.
6. *Sentence*: *distilled* loses 20 points or more on *domains* and less than 5 with *two writings*; *own* loses less
   than 10.
7. *Labels*: *picked* below 60 %, *distilled* below 20 %, *regmean* above 60 %, *joint* below 20 %.
"""
