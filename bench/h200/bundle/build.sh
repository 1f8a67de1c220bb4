#!/usr/bin/env bash
# Build, on a machine with PyPI and without a GPU, one archive (40 MB) that lets SGLang 0.5.14 run on a Hopper machine that
# reaches nothing: build.sh FILE.tar.zst [WORK_FOLDER]
# The GPU machine has Python 3.12 with torch 2.11 (CUDA 13), nvcc and the packages that torch's image commonly has
# (docs/performance.md). Here: Python 3.12 (PYTHON), gcc, unzip, zstd; about 10 minutes, 2 when the work folder is kept.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
archive=$(realpath -m "$1")
work=${2:-$PWD/build/h200-bundle}
mkdir -p "$work" && cd "$work"

venv=$work/venv
[ -x "$venv/bin/python" ] || "${PYTHON:-python3.12}" -m venv "$venv"
pip=("$venv/bin/pip" --quiet --disable-pip-version-check)
wheels=(download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp)
for n in 39 35 34 31 28 27 24 17; do wheels+=(--platform "manylinux_2_${n}_x86_64"); done
wheels+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform linux_x86_64)
mkdir -p sglang packages
[ -n "$(ls packages)" ] || "${pip[@]}" "${wheels[@]}" --dest packages --requirement "$here/requirements.txt"
ls sglang/sglang-0.5.14-*.whl >/dev/null 2>&1 || "${pip[@]}" "${wheels[@]}" --dest sglang sglang==0.5.14
ls sglang/sglang_kernel-*.whl >/dev/null 2>&1 || "${pip[@]}" "${wheels[@]}" --dest sglang sglang-kernel==0.4.4

# Unpacked, without resolving anything; of the kernels (1.8 GB) only what a Hopper card runs, without FA3.
rm -rf site
"${pip[@]}" install --no-index --no-deps --no-compile --target site packages/*.whl sglang/sglang-0.5.14-*.whl
(cd site && unzip -q ../sglang/sglang_kernel-*.whl -x 'sgl_kernel/flash_ops*' 'sgl_kernel/sm100/*' 'sgl_kernel/flashmla_ops*')
mkdir site/flashinfer && cp "$here"/flashinfer/*.py site/flashinfer/
# sgl_kernel takes its own sampling when flashinfer's does not import.
sed -i 's/^    import flashinfer.sampling as _flashinfer_sampling/    raise ImportError/' site/sgl_kernel/sampling.py

# The JIT kernels. libcuda comes with a driver: here its symbols are functions that fail, which nobody calls.
if [ ! -d tvmcache ]; then
  "${pip[@]}" install torch==2.11.0 torchvision==0.26.0 'cuda-toolkit[nvcc,cccl]==13.0.2' ninja numpy \
    aiohttp aiofiles einops numba scipy prometheus-client uvloop msgpack pandas pyarrow protobuf nvidia-ml-py pillow \
    psutil requests sentencepiece tiktoken tqdm watchfiles accelerate huggingface_hub python-dateutil
  cuda=$(echo "$venv"/lib/python3.12/site-packages/nvidia/cu13)
  mkdir -p cuda/lib64 driver
  find site/sgl_kernel -name '*.so' -exec nm -D --undefined-only {} + 2>/dev/null | awk '/ U cu[A-Z]/ {print $2}' \
    | sed 's/@.*//' | grep -vE '^cu(da|blas|sparse|fft|rand|solver)[A-Z]' | sort -u \
    | sed 's/.*/int &(void) { return 100; }/' > driver.c
  gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o driver/libcuda.so.1 driver.c
  for part in bin include nvvm; do ln -sfn "$cuda/$part" "cuda/$part"; done
  ln -sfn "$cuda/lib/libcudart.so.13" cuda/lib64/libcudart.so
  ln -sfn "$PWD/driver/libcuda.so.1" cuda/lib64/libcuda.so
  CUDA_HOME=$PWD/cuda PATH=$venv/bin:$PWD/cuda/bin:$PATH LD_LIBRARY_PATH=$PWD/driver PYTHONPATH=site \
    SGLANG_IS_FLASHINFER_AVAILABLE=false TVM_FFI_CACHE_DIR=$PWD/tvmcache "$venv/bin/python" "$here/precompile.py"
fi
find site -name __pycache__ -prune -exec rm -rf {} +
tar -c --exclude='*.o' --exclude='.ninja*' site tvmcache | zstd -T0 -19 -q -f -o "$archive"
du -m "$archive"
