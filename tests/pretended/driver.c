// A CUDA driver that loads and computes nothing. It writes down every launch, and refuses what the
// driver's documentation refuses: tensor maps (cuTensorMapEncodeTiled) and sizes of launches.
//
// Environment: PRETENDED_LOG is the file it writes to; PRETENDED_SHARED_MEMORY the bytes of shared
// memory that a block of threads may have.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

enum { MOST_KERNELS = 4096, LONGEST_NAME = 160 };

static char names[MOST_KERNELS][LONGEST_NAME];
static int kernels;
static int context;

static FILE *out(void) {
  static FILE *file;
  if (file == NULL) {
    const char *path = getenv("PRETENDED_LOG");
    file = path == NULL ? stderr : fopen(path, "a");
    setvbuf(file, NULL, _IOLBF, 0);
  }
  return file;
}

static unsigned shared_memory(void) {
  const char *given = getenv("PRETENDED_SHARED_MEMORY");
  return given == NULL ? 232448 : (unsigned)atoi(given);
}

static CUresult refused(const char *what) {
  fprintf(out(), "FAULT %s\n", what);
  return CUDA_ERROR_INVALID_VALUE;
}

// ---- devices, contexts and modules: one of each

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "refused by the pretended driver";
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *found) {
  *found = (CUcontext)&context;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext given) { return CUDA_SUCCESS; }

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice device) {
  return cuCtxGetCurrent(found);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = shared_memory();
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
      *value = 65536;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 132;
      break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      *value = 32;
      break;
    default:
      *value = 1000;
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *data) {
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  if (kernels == MOST_KERNELS) return refused("too many kernels for one process");
  snprintf(names[kernels], LONGEST_NAME, "%s", name);
  kernels++;
  *function = (CUfunction)(uintptr_t)kernels;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(uint64_t *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function,
                                      const CUlaunchConfig *config) {
  *count = 132;
  return CUDA_SUCCESS;
}

// ---- what is checked

// The limits of a grid and of a block of threads (CUDA C++ Programming Guide, compute capability 8
// and 9).
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
  fprintf(out(), "LAUNCH %s\n", names[(uintptr_t)function - 1]);
  if (config->gridDimX < 1 || config->gridDimX > 2147483647u) return refused("grid in x");
  if (config->gridDimY < 1 || config->gridDimY > 65535) return refused("grid in y");
  if (config->gridDimZ < 1 || config->gridDimZ > 65535) return refused("grid in z");
  if (config->blockDimX < 1 || config->blockDimX > 1024) return refused("threads of a block");
  if (config->sharedMemBytes > shared_memory()) return refused("shared memory");
  return CUDA_SUCCESS;
}

static unsigned bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
      return 8;
    default:
      return 4;
  }
}

// The most bytes of a box's inner dimension for a swizzle; 0: no limit of its own.
static unsigned swizzle_span(CUtensorMapSwizzle swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_32B:
      return 32;
    case CU_TENSOR_MAP_SWIZZLE_64B:
      return 64;
    case CU_TENSOR_MAP_SWIZZLE_NONE:
      return 0;
    default:
      return 128;
  }
}

// The conditions of cuTensorMapEncodeTiled (CUDA Driver API, Tensor Map Object Management) without
// interleaving, which Triton does not use.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  memset(map, 0, sizeof *map);
  fprintf(out(), "MAP\n");
  if ((uintptr_t)map % 64 != 0) return refused("map: its own place");
  if ((uintptr_t)address % 16 != 0) return refused("map: address");
  if (rank < 1 || rank > 5) return refused("map: rank");
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) return refused("map: interleaved");
  for (unsigned i = 0; i < rank; i++) {
    if (sizes[i] < 1 || sizes[i] > (1ull << 32)) return refused("map: size");
    if (box[i] < 1 || box[i] > 256) return refused("map: box");
    if (steps[i] < 1 || steps[i] > 8) return refused("map: element stride");
  }
  // the stride of the innermost dimension is not given: its elements are neighbours
  for (unsigned i = 0; i + 1 < rank; i++) {
    if (strides[i] % 16 != 0 || strides[i] >= (1ull << 40)) return refused("map: stride");
  }
  unsigned inner = box[0] * bytes_of(type);
  if (inner % 16 != 0) return refused("map: inner dimension of the box");
  unsigned span = swizzle_span(swizzle);
  if (span != 0 && inner > span) return refused("map: box wider than its swizzle");
  return CUDA_SUCCESS;
}
