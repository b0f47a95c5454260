/*
 * Attention on a GPU from C: device memory, a stream and a graph of the caller. Prints the time of a call on
 * the host beside that of launching an empty kernel. Needs cuda.h of any CUDA 12 or 13:
 *
 *     cc cuda.c $(pkg-config --cflags --libs flashcore) -lcuda -lm -o cuda && ./cuda
 */
#define _POSIX_C_SOURCE 199309L
#include <cuda.h>
#include <flashcore.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { HEADS = 8, ROWS = 64, DIM = 64, COUNT = HEADS * ROWS * DIM, CALLS = 200, REPEATS = 21 };

#define DRIVER(call)                                                                    \
  do {                                                                                  \
    CUresult result = (call);                                                           \
    if (result != CUDA_SUCCESS) fprintf(stderr, #call ": error %d\n", result), exit(1); \
  } while (0)

static char error[256];

static void flashcore(int32_t code) {
  if (code != FLASHCORE_OK) fprintf(stderr, "%s\n", error), exit(1);
}

static flashcore_operand tensor(uint32_t operand, CUdeviceptr address) {
  flashcore_operand o = {.operand = operand, .dtype = FLASHCORE_F32, .address = address, .dimensions = 4,
                         .shape = {1, HEADS, ROWS, DIM}, .strides = {COUNT, ROWS * DIM, DIM, 1}};
  return o;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

static int by_size(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static const char *EMPTY = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry empty() { ret; }\n";

int main(void) {
  CUdevice device;
  CUcontext context;
  CUstream stream;
  DRIVER(cuInit(0));
  DRIVER(cuDeviceGet(&device, 0));
  DRIVER(cuDevicePrimaryCtxRetain(&context, device));
  DRIVER(cuCtxSetCurrent(context));
  DRIVER(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  static float x[COUNT], from_device[COUNT], from_host[COUNT];
  for (int i = 0; i < COUNT; i++) x[i] = (float)(i * 37 % 101) / 50 - 1;
  CUdeviceptr in, out;
  DRIVER(cuMemAlloc(&in, sizeof x));
  DRIVER(cuMemAlloc(&out, sizeof x));
  DRIVER(cuMemcpyHtoD(in, x, sizeof x));
  flashcore_operand operands[] = {tensor(FLASHCORE_Q, in), tensor(FLASHCORE_K, in), tensor(FLASHCORE_V, in),
                                  tensor(FLASHCORE_OUT, out)};
  flashcore_call call = {.size = sizeof call, .error = error, .error_size = sizeof error, .operands = operands,
                         .operand_count = 4, .device_type = FLASHCORE_CUDA, .stream = (uintptr_t)stream,
                         .flags = FLASHCORE_CAUSAL};
  flashcore(flashcore_prepare(&call));

  /* A prepared call may be captured: it neither compiles nor allocates. */
  CUgraph graph;
  CUgraphExec exec;
  DRIVER(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  flashcore(flashcore_attention(&call));
  DRIVER(cuStreamEndCapture(stream, &graph));
  DRIVER(cuGraphInstantiateWithFlags(&exec, graph, 0));
  DRIVER(cuGraphLaunch(exec, stream));
  DRIVER(cuStreamSynchronize(stream));
  DRIVER(cuMemcpyDtoH(from_device, out, sizeof x));

  for (int i = 0; i < 3; i++) operands[i].address = (uintptr_t)x;
  operands[3].address = (uintptr_t)from_host;
  call.device_type = FLASHCORE_CPU;
  flashcore(flashcore_attention(&call));
  double largest = 0;
  for (int i = 0; i < COUNT; i++) largest = fmax(largest, fabs(from_device[i] - from_host[i]));
  printf("the largest difference between GPU and host is %.1e\n", largest);

  CUmodule module;
  CUfunction empty;
  DRIVER(cuModuleLoadData(&module, EMPTY));
  DRIVER(cuModuleGetFunction(&empty, module, "empty"));
  for (int i = 0; i < 3; i++) operands[i].address = in;
  operands[3].address = out;
  call.device_type = FLASHCORE_CUDA;
  double times[2][REPEATS];
  for (int r = 0; r < REPEATS; r++)
    for (int ours = 0; ours < 2; ours++) {
      DRIVER(cuStreamSynchronize(stream));
      double start = now();
      for (int i = 0; i < CALLS; i++)
        if (ours) flashcore(flashcore_attention(&call));
        else DRIVER(cuLaunchKernel(empty, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL));
      times[ours][r] = (now() - start) / CALLS;
    }
  for (int ours = 0; ours < 2; ours++) qsort(times[ours], REPEATS, sizeof(double), by_size);
  printf("a call takes %.2f us on the host, launching an empty kernel %.2f us\n", times[1][REPEATS / 2],
         times[0][REPEATS / 2]);
  return largest < 1e-4 ? 0 : 1;
}
