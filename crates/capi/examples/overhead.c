/*
 * The time of a call on the host, beside that of an empty function of the library: causal attention of one head
 * and one row, which computes next to nothing, and the preparation of the call alone.
 *
 *     cc -O2 overhead.c $(pkg-config --cflags --libs flashcore) -o overhead && ./overhead
 */
#define _POSIX_C_SOURCE 199309L
#include <flashcore.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { CALLS = 2000, REPEATS = 21, DIM = 64 };

static float x[DIM], out[DIM];
static char error[256];
static flashcore_operand operands[4];
static flashcore_call call;

static void attention(void) { flashcore_attention(&call); }
static void prepare(void) { flashcore_prepare(&call); }
static void version(void) { flashcore_version(); }

static int by_size(const void *a, const void *b) {
  double left = *(const double *)a, right = *(const double *)b;
  return (left > right) - (left < right);
}

/* The median time of a call in microseconds. */
static double microseconds(void (*function)(void)) {
  static double times[REPEATS];
  for (int r = 0; r < REPEATS; r++) {
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (int i = 0; i < CALLS; i++) function();
    clock_gettime(CLOCK_MONOTONIC, &to);
    times[r] = ((to.tv_sec - from.tv_sec) * 1e6 + (to.tv_nsec - from.tv_nsec) * 1e-3) / CALLS;
  }
  qsort(times, REPEATS, sizeof times[0], by_size);
  return times[REPEATS / 2];
}

int main(void) {
  for (uint32_t i = 0; i < 4; i++) {
    flashcore_operand o = {.operand = i, .dtype = FLASHCORE_F32, .address = (uintptr_t)(i == FLASHCORE_OUT ? out : x),
                           .dimensions = 4, .shape = {1, 1, 1, DIM}, .strides = {DIM, DIM, DIM, 1}};
    operands[i] = o;
  }
  call = (flashcore_call){.size = sizeof call, .error = error, .error_size = sizeof error, .operands = operands,
                          .operand_count = 4, .device_type = FLASHCORE_CPU, .flags = FLASHCORE_CAUSAL};
  if (flashcore_attention(&call) != FLASHCORE_OK) return fprintf(stderr, "%s\n", error), 1;
  double times[] = {microseconds(attention), microseconds(prepare), microseconds(version)};
  printf("attention %.3f us, its preparation %.3f us, an empty function %.3f us\n", times[0], times[1], times[2]);
  return 0;
}
