/*
 * The time of a call on the host above that of an empty call: causal attention of 8 heads and one row, which
 * computes next to nothing. On the CPU the empty call is a function of the library; on a GPU (`./overhead
 * cuda`) it launches an empty kernel, and calls alternate between two sets of tensors.
 *
 *     cc -O2 overhead.c $(pkg-config --cflags --libs flashcore) -ldl -o overhead && ./overhead
 *
 * Each line of the output is a measurement, which `cargo xtask measure host ROWS.jsonl ./overhead cuda` keeps.
 */
#define _POSIX_C_SOURCE 199309L
#include <dlfcn.h>
#include <flashcore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Fewer calls between two waits than the queue of a GPU holds. */
enum { CALLS = 200, REPEATS = 51, HEADS = 8, DIM = 64, SETS = 2 };

static char error[256];
static flashcore_operand operands[SETS][4];
static flashcore_call call;
static unsigned set;

/* The part of the driver's interface that is used here. */
static int (*driver_launch)(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            void *stream, void **parameters, void **extra);
static int (*driver_wait)(void *stream);
static void *stream, *empty;

static void attention(void) {
  call.operands = operands[set++ % SETS];
  if (flashcore_attention(&call) != FLASHCORE_OK) fprintf(stderr, "%s\n", error), exit(1);
}
static void version(void) { flashcore_version(); }
static void launch(void) { driver_launch(empty, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL); }

static int by_size(const void *a, const void *b) {
  double left = *(const double *)a, right = *(const double *)b;
  return (left > right) - (left < right);
}

/* The time of a call in microseconds. */
static double microseconds(void (*function)(void)) {
  struct timespec from, to;
  if (stream) driver_wait(stream);
  clock_gettime(CLOCK_MONOTONIC, &from);
  for (int i = 0; i < CALLS; i++) function();
  clock_gettime(CLOCK_MONOTONIC, &to);
  return ((to.tv_sec - from.tv_sec) * 1e6 + (to.tv_nsec - from.tv_nsec) * 1e-3) / CALLS;
}

static void tell(const char *name, const double *samples) {
  double sorted[REPEATS];
  memcpy(sorted, samples, sizeof sorted);
  qsort(sorted, REPEATS, sizeof sorted[0], by_size);
  printf("MEASURE {\"measure\": \"%s\", \"unit\": \"us\", \"calls\": %d, ", name, CALLS * REPEATS);
  printf("\"median\": %.4f, \"p99\": %.4f, \"samples\": [", sorted[REPEATS / 2], sorted[REPEATS - 1]);
  for (int r = 0; r < REPEATS; r++) printf("%s%.4f", r ? ", " : "", samples[r]);
  printf("]}\n");
}

static void *driver(const char *name) {
  static void *library;
  if (!library) library = dlopen("libcuda.so.1", RTLD_NOW);
  void *function = library ? dlsym(library, name) : NULL;
  if (!function) fprintf(stderr, "no %s in libcuda.so.1\n", name), exit(1);
  return function;
}

static void on_gpu(void) {
  static const char text[] = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry empty() { ret; }\n";
  int device, failed;
  void *context, *module;
  unsigned long long memory;
  int (*init)(unsigned), (*get)(int *, int), (*retain)(void **, int), (*bind)(void *), (*make)(void **, unsigned),
      (*load)(void **, const void *), (*find)(void **, void *, const char *),
      (*allocate)(unsigned long long *, size_t);
  *(void **)&init = driver("cuInit"), *(void **)&get = driver("cuDeviceGet");
  *(void **)&retain = driver("cuDevicePrimaryCtxRetain"), *(void **)&bind = driver("cuCtxSetCurrent");
  *(void **)&make = driver("cuStreamCreate"), *(void **)&load = driver("cuModuleLoadData");
  *(void **)&find = driver("cuModuleGetFunction"), *(void **)&allocate = driver("cuMemAlloc_v2");
  *(void **)&driver_launch = driver("cuLaunchKernel"), *(void **)&driver_wait = driver("cuStreamSynchronize");
  failed = init(0) || get(&device, 0) || retain(&context, device) || bind(context) || make(&stream, 1) ||
           load(&module, text) || find(&empty, module, "empty") || allocate(&memory, SETS * 4 * 4096);
  if (failed) fprintf(stderr, "no GPU\n"), exit(1);
  for (int s = 0; s < SETS; s++)
    for (int i = 0; i < 4; i++) operands[s][i].address = memory + (s * 4 + i) * 4096;
  call.device_type = FLASHCORE_CUDA, call.stream = (uintptr_t)stream;
}

int main(int argc, char **argv) {
  static uint16_t x[HEADS * DIM], out[HEADS * DIM];
  int gpu = argc > 1 && strcmp(argv[1], "cuda") == 0;
  for (uint32_t s = 0; s < SETS; s++)
    for (uint32_t i = 0; i < 4; i++) {
      flashcore_operand o = {.operand = i, .dtype = FLASHCORE_F16, .dimensions = 4, .shape = {1, HEADS, 1, DIM},
                             .strides = {HEADS * DIM, DIM, DIM, 1},
                             .address = (uintptr_t)(i == FLASHCORE_OUT ? out : x)};
      operands[s][i] = o;
    }
  call = (flashcore_call){.size = sizeof call, .error = error, .error_size = sizeof error, .operand_count = 4,
                          .device_type = FLASHCORE_CPU, .flags = FLASHCORE_CAUSAL, .operands = operands[0]};
  if (gpu) on_gpu();
  double ours[REPEATS], nothing[REPEATS], above[REPEATS];
  for (int i = 0; i < 2 * SETS; i++) attention();
  for (int r = 0; r < REPEATS; r++) {
    ours[r] = microseconds(attention), nothing[r] = microseconds(gpu ? launch : version);
    above[r] = ours[r] - nothing[r];
  }
  tell(gpu ? "C: flashcore_attention" : "C: flashcore_attention on the CPU", ours);
  tell(gpu ? "C: an empty kernel" : "C: an empty function", nothing);
  tell(gpu ? "C: flashcore_attention above an empty kernel" : "C: flashcore_attention above an empty function", above);
  return 0;
}
