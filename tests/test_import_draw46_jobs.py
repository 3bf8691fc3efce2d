"""Options of a batch system on the command that submits a script, and what it sets for the script."""

from pathlib import Path

import pytest
from import_files import written

from planner.trainers.reading import read
from planner.trainers.reading.given import Given, OpenQuestionsError

MODEL = "--num-layers $LAYERS --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \\\n  "
MODEL += "--micro-batch-size 2 --global-batch-size 256 --vocab-size 32000 --bf16 --use-distributed-optimizer\n"
JOB = f"""#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gres=gpu:8
#SBATCH --ntasks-per-node=1
LAYERS=${{LAYERS:-24}}
GPUS=$SLURM_GPUS_ON_NODE
srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=$GPUS pretrain_gpt.py {MODEL}"""


def _gpus(folder: Path, command: str, job: str = JOB) -> int | None:
    written(folder, job, "train.sh")
    return read(written(folder, f"#!/bin/bash\n{command}\n", "start.sh"), None, Given()).num_gpus


@pytest.mark.parametrize(("command", "gpus"), [
    ("sbatch train.sh", 32), ("sbatch --nodes=2 train.sh", 16), ("sbatch --job-name=small-N3 -N 2 -p fast train.sh", 16),
    ("sbatch -N1 --gres=gpu:4 train.sh", 4), ("sbatch -N 2 --gpus-per-node=4 train.sh", 8),
    ("NODES=2\nsbatch --nodes $NODES --array=0-3 train.sh small --nodes=9", 16), ("id=$(sbatch --parsable -N 2 train.sh)", 16),
    ("salloc -N 2 bash train.sh", 16), ("sbatch -N 1 other.sh\nsbatch -N 2 train.sh", 16),
    ("bash train.sh", 32),
])  # fmt: skip
def test_words_of_the_command_go_before_the_lines_of_the_script(tmp_path: Path, command: str, gpus: int) -> None:
    written(tmp_path, "#!/bin/bash\n#SBATCH --nodes=1\npython clean.py --rows 10\n", "other.sh")
    job = JOB if command != "bash train.sh" else JOB.replace("$SLURM_NNODES", "4").replace("$SLURM_GPUS_ON_NODE", "8")
    assert _gpus(tmp_path, command, job) == gpus


def test_a_script_that_is_written_is_submitted(tmp_path: Path) -> None:
    text = JOB.replace("$SLURM", "\\$SLURM").replace("$LAYERS", "24").replace("$GPUS", "8").replace("${LAYERS:-24}", "24")
    assert _gpus(tmp_path, f"sbatch -N 2 << EOF\n{text}EOF") == 16
    assert _gpus(tmp_path, f"cat > job.sh << EOF\n{text}EOF\nsbatch -N 2 job.sh") == 16


def test_pbs_has_the_same_rule(tmp_path: Path) -> None:
    job = JOB.replace("#SBATCH --nodes=4", "#PBS -l select=4:ngpus=8").replace("$SLURM_NNODES", "$NODES")
    assert _gpus(tmp_path, "qsub -l select=2:ngpus=4 -v NODES=2 train.sh", job.replace("$SLURM_GPUS_ON_NODE", "4")) == 8


def test_variables_of_export_are_set_for_the_script_alone(tmp_path: Path) -> None:
    written(tmp_path, JOB, "train.sh")
    text = "#!/bin/bash\nsbatch --export=ALL,LAYERS=12 -N 2 train.sh\n"
    assert read(written(tmp_path, text, "start.sh"), None, Given()).model.num_layers == 12


def test_nodes_that_nobody_says_are_not_those_of_the_script(tmp_path: Path) -> None:
    assert _gpus(tmp_path, "sbatch -N $NODES train.sh") is None


def test_gpus_are_asked_for_with_those_of_a_node(tmp_path: Path) -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 2048\n'
    written(tmp_path, f"{text}[parallelism]\ndata_parallel_shard_degree = -1\n", "small.toml")
    start = "torchrun --nnodes=$NODES --nproc_per_node=EACH -m torchtitan.train --job.config_file small.toml\n"
    for each, said in (("4", "a multiple of 4"), ("1", "is -1")):
        with pytest.raises(OpenQuestionsError) as caught:
            read(written(tmp_path, start.replace("EACH", each), "start.sh"), None, Given())
        assert next(one.about for one in caught.value.questions if one.name == "--gpus N").endswith(said)
