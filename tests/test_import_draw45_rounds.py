"""One round of questions: all that a file leaves open is asked for in its first message."""

from pathlib import Path

import pytest
from import_files import written

from planner.trainers.reading import read
from planner.trainers.reading.given import Given, OpenQuestionsError

AUTO = '{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
TEMPLATE = """{
  "train_batch_size": BATCH,
  "train_micro_batch_size_per_gpu": Micro_1st,
  "steps_per_print": LOG_EVERY,
  "zero_optimization": {"stage": STAGE},
  "bf16": {"enabled": WITH_BF16},
  "curriculum_learning": {"enabled": SHORT_FIRST}
}
"""


def _questions(path: Path, given: Given) -> list[str]:
    with pytest.raises(OpenQuestionsError) as error:
        read(path, None, given)
    return [one.name for one in error.value.questions]


class TestDeepSpeedFile:
    """A configuration of DeepSpeed alone, which is no more than a part of its job."""

    def test_one_sentence_asks_for_batch_gpus_recompute_model_and_length(self, tmp_path: Path) -> None:
        names = _questions(written(tmp_path, AUTO, "ds.json"), Given())
        assert names == ["--micro-batch-size M", "--gpus N", "gradient_checkpointing", "--model NAME", "--sequence-length S"]

    def test_words_of_a_template_are_asked_for_and_put_in_their_places(self, tmp_path: Path) -> None:
        path = written(tmp_path, TEMPLATE, "ds.json")
        given = Given(num_gpus=4, model="llama-8b", sequence_length=1024)
        assert _questions(path, given) == ["BATCH", "Micro_1st", "STAGE", "WITH_BF16", "gradient_checkpointing"]
        answers = {"BATCH": "64", "Micro_1st": "2", "STAGE": "3", "WITH_BF16": "true", "gradient_checkpointing": "true"}
        job = read(path, None, given.with_settings(answers))
        assert (job.fields["zero"], job.fields["dp"], job.fields["num_microbatches"], job.precision) == (3, 4, 8, "bf16")
        assert "BATCH" not in job.unread
        assert "curriculum_learning: not in the plan" in "; ".join(job.notes)

    def test_the_question_for_gpus_says_what_they_share(self, tmp_path: Path) -> None:
        text = AUTO.replace('"auto"', '2, "train_batch_size": 8')
        with pytest.raises(OpenQuestionsError, match="they share 4 micro batches"):
            read(written(tmp_path, text, "ds.json"), None, Given())
