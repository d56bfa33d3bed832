#!/bin/bash
#SBATCH --job-name={{name}}
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={{gpus}}
#SBATCH --cpus-per-task={{cores}}
#SBATCH --mem=0
#SBATCH --time={{clock}}
#SBATCH --partition={{partition}}
#SBATCH --account={{account}}
#SBATCH --signal=TERM@{{notice}}
#SBATCH --open-mode=append
#SBATCH --output={{name}}-%j.log
#SBATCH --exclusive
#SBATCH --requeue

set -euo pipefail
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
#: Not by head, which would end scontrol by SIGPIPE, and the job with it.
first=${nodes%%$'\n'*}
export OMP_NUM_THREADS=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={{saving}}
#: Since SLURM 22.05 srun does not take the cores from the job.
srun --cpus-per-task={{cores}} {{command}}
