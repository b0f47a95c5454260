/* Causal attention with grouped heads on the host, compared with a plain loop. */
#include <flashcore.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 2, HEADS = 4, HEADS_KV = 2, ROWS = 5, KEYS = 9, DIM = 16 };

static float q[BATCH][HEADS][ROWS][DIM], k[BATCH][HEADS_KV][KEYS][DIM], v[BATCH][HEADS_KV][KEYS][DIM];
static float out[BATCH][HEADS][ROWS][DIM], lse[BATCH][HEADS][ROWS];

static void fill(float *x, size_t n, int seed) {
  for (size_t i = 0; i < n; i++) x[i] = (float)((i * 37 + (size_t)seed * 11) % 23) / 11.0f - 1.0f;
}

static flashcore_operand tensor(uint32_t operand, void *x, int64_t heads, int64_t rows) {
  flashcore_operand o = {.operand = operand, .dtype = FLASHCORE_F32, .address = (uintptr_t)x, .dimensions = 4};
  int64_t shape[4] = {BATCH, heads, rows, DIM};
  for (int i = 3, stride = 1; i >= 0; i--) {
    o.shape[i] = shape[i];
    o.strides[i] = stride;
    stride *= (int)shape[i];
  }
  return o;
}

/* The last query is level with the last key. Returns the largest difference of O and of the LSE. */
static double largest_difference(void) {
  double largest = 0;
  for (int b = 0; b < BATCH; b++)
    for (int h = 0; h < HEADS; h++)
      for (int i = 0; i < ROWS; i++) {
        int of = h / (HEADS / HEADS_KV), keys = i + 1 + KEYS - ROWS;
        double s[KEYS], sum = 0;
        for (int j = 0; j < keys; j++) {
          double dot = 0;
          for (int d = 0; d < DIM; d++) dot += (double)q[b][h][i][d] * k[b][of][j][d];
          s[j] = exp(dot / sqrt(DIM));
          sum += s[j];
        }
        largest = fmax(largest, fabs(log(sum) - lse[b][h][i]));
        for (int d = 0; d < DIM; d++) {
          double o = 0;
          for (int j = 0; j < keys; j++) o += s[j] / sum * v[b][of][j][d];
          largest = fmax(largest, fabs(o - out[b][h][i][d]));
        }
      }
  return largest;
}

int main(void) {
  fill(&q[0][0][0][0], sizeof q / sizeof(float), 1);
  fill(&k[0][0][0][0], sizeof k / sizeof(float), 2);
  fill(&v[0][0][0][0], sizeof v / sizeof(float), 3);
  flashcore_operand operands[] = {
      tensor(FLASHCORE_Q, q, HEADS, ROWS),
      tensor(FLASHCORE_K, k, HEADS_KV, KEYS),
      tensor(FLASHCORE_V, v, HEADS_KV, KEYS),
      tensor(FLASHCORE_OUT, out, HEADS, ROWS),
      {.operand = FLASHCORE_LSE, .dtype = FLASHCORE_F32, .address = (uintptr_t)lse, .dimensions = 3,
       .shape = {BATCH, HEADS, ROWS}, .strides = {HEADS * ROWS, ROWS, 1}},
  };
  char error[256] = "";
  flashcore_call call = {.size = sizeof call, .error = error, .error_size = sizeof error, .operands = operands,
                         .operand_count = 5, .flags = FLASHCORE_CAUSAL, .device_type = FLASHCORE_CPU};
  if (flashcore_attention(&call) != FLASHCORE_OK) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  double largest = largest_difference();
  printf("FlashCore %s: the largest difference from a plain loop is %.1e\n", flashcore_version(), largest);
  return largest < 1e-5 ? 0 : 1;
}
