/*
 * Attention on a GPU from C: device memory, a stream and a graph of the caller. `overhead.c` measures the time
 * of a call. Needs cuda.h of any CUDA 12 or 13:
 *
 *     cc cuda.c $(pkg-config --cflags --libs flashcore) -lcuda -lm -o cuda && ./cuda
 */
#include <cuda.h>
#include <flashcore.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 8, ROWS = 64, DIM = 64, COUNT = HEADS * ROWS * DIM };

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
  return largest < 1e-4 ? 0 : 1;
}
