/* Calls of several threads at once, and of a child that was forked after them, give the bits of a lone call. */
#define _POSIX_C_SOURCE 200809L
#include <flashcore.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HEADS = 4, ROWS = 160, DIM = 32, COUNT = HEADS * ROWS * DIM, THREADS = 6 };

static float x[COUNT], out[THREADS + 2][COUNT];

static flashcore_operand tensor(uint32_t operand, float *address) {
  flashcore_operand o = {.operand = operand, .dtype = FLASHCORE_F32, .address = (uintptr_t)address,
                         .dimensions = 4, .shape = {1, HEADS, ROWS, DIM},
                         .strides = {COUNT, ROWS * DIM, DIM, 1}};
  return o;
}

static void *compute(void *to) {
  flashcore_operand operands[] = {tensor(FLASHCORE_Q, x), tensor(FLASHCORE_K, x), tensor(FLASHCORE_V, x),
                                  tensor(FLASHCORE_OUT, to)};
  char error[256];
  flashcore_call call = {.size = sizeof call, .error = error, .error_size = sizeof error, .operands = operands,
                         .operand_count = 4, .device_type = FLASHCORE_CPU, .flags = FLASHCORE_CAUSAL};
  if (flashcore_attention(&call) != FLASHCORE_OK) fprintf(stderr, "%s\n", error);
  return NULL;
}

int main(void) {
  for (int i = 0; i < COUNT; i++) x[i] = (float)(i * 37 % 101) / 50 - 1;
  compute(out[THREADS]);
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++)
    if (pthread_create(&threads[i], NULL, compute, out[i])) return 1;
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  for (int i = 0; i < THREADS; i++)
    if (memcmp(out[i], out[THREADS], sizeof out[i])) return puts("different"), 1;
  pid_t child = fork();
  if (child == 0) {
    compute(out[THREADS + 1]);
    _exit(memcmp(out[THREADS + 1], out[THREADS], sizeof out[0]) ? 1 : 0);
  }
  int status = 1;
  if (child < 0 || waitpid(child, &status, 0) != child || status != 0) return puts("the child differs"), 1;
  puts("equal");
  return 0;
}
