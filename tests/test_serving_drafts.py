"""What drafts tokens, in the words of an engine."""

from planner.model import load_model
from planner.serving.export import sglang_server
from planner.serving.export.serve_job import ModelNames, ServeJob
from planner.serving.serving_weights import draft_head
from planner.serving.traffic import Lengths, Speculation, Traffic
from tests.serve_samples import sample_plan


def test_a_model_of_its_own_drafts_as_one_and_a_head_as_eagle() -> None:
    """1B is no head of a 70B model; what an import of EAGLE3 says it reads is."""
    head = draft_head(load_model("llama-3.1-70b"))
    for size, named in ((1e9, "STANDALONE"), (head, "EAGLE3")):
        drafts = Speculation(depth=3, acceptance=0.8, draft_parameters=size)
        traffic = Traffic(input=Lengths.fixed(512), output=Lengths.fixed(256), speculation=drafts)
        job = ServeJob.of(sample_plan(engine="sglang@0.5.23", traffic=traffic))
        words = sglang_server.words(job, job.pools[0], ModelNames())
        assert words[words.index("--speculative-algorithm") + 1] == named
        assert words[words.index("--speculative-draft-model-path") + 1] == "$DRAFT_MODEL"
