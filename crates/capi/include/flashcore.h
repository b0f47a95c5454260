/*
 * FlashCore: fused attention on the host and on NVIDIA GPUs, called on addresses.
 *
 * A caller fills a flashcore_call and passes it to flashcore_attention. Zero bytes are the default of every
 * field but `size`. Link with -lflashcore_c (pkg-config flashcore).
 *
 *     flashcore_operand operands[] = {
 *         {.operand = FLASHCORE_Q, .dtype = FLASHCORE_F32, .address = (uintptr_t)q, .dimensions = 4,
 *          .shape = {batch, heads, rows, dim}, .strides = {heads * rows * dim, rows * dim, dim, 1}},
 *         ... K, V, OUT
 *     };
 *     char error[256];
 *     flashcore_call call = {.size = sizeof call, .error = error, .error_size = sizeof error,
 *                            .operands = operands, .operand_count = 4, .device_type = FLASHCORE_CPU,
 *                            .flags = FLASHCORE_CAUSAL};
 *     if (flashcore_attention(&call) != FLASHCORE_OK) fprintf(stderr, "%s\n", error);
 */
#ifndef FLASHCORE_H
#define FLASHCORE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The number of this interface. A library of another number has another soname. */
#define FLASHCORE_ABI 1

/* Results of the functions. */
#define FLASHCORE_OK 0
/* An argument is not valid, or arguments do not fit each other. */
#define FLASHCORE_INVALID 1
/* No kernel, processor or GPU here computes such a problem. */
#define FLASHCORE_UNSUPPORTED 2
/* The driver or the GPU failed. */
#define FLASHCORE_DEVICE 3
/* A defect of the library. */
#define FLASHCORE_INTERNAL 4

/* Element types: a DLDataType of DLPack as one number, code | bits << 8 | lanes << 16. */
#define FLASHCORE_F32 0x12002
#define FLASHCORE_F16 0x11002
#define FLASHCORE_BF16 0x11004
#define FLASHCORE_E4M3 0x1080a
#define FLASHCORE_E5M2 0x1080c
#define FLASHCORE_I32 0x12000
#define FLASHCORE_I64 0x14000
#define FLASHCORE_U8 0x10801

/* Operands: where `operand` of a flashcore_operand says what it is. Names and meanings are FlashAttention's. */
/* Tensors of four dimensions in the order batch, head, row, dim, with any strides; the last is contiguous.
 * Packed tensors (with cumulative lengths) have a batch extent of 1. With a page table, K and V are pools
 * [page, head, row, dim]. */
#define FLASHCORE_Q 0
#define FLASHCORE_K 1
#define FLASHCORE_V 2
#define FLASHCORE_OUT 3
/* f32, dense, [batch, head, row], natural logarithm. The forward pass writes it if it is given. */
#define FLASHCORE_LSE 4
/* i32, [batch + 1]. */
#define FLASHCORE_CU_SEQLENS_Q 5
#define FLASHCORE_CU_SEQLENS_K 6
/* i32, [batch]. */
#define FLASHCORE_SEQUSED_Q 7
#define FLASHCORE_SEQUSED_K 8
#define FLASHCORE_LEFTPAD_K 9
/* i32, [batch, pages of a sequence]. */
#define FLASHCORE_PAGE_TABLE 10
/* f32, [head]: a logit per query head that is part of the softmax's denominator alone. */
#define FLASHCORE_SINKS 11
/* f32, [batch, kv_head], or [batch, kv_head, block] with a number of rows in `scale_rows`. */
#define FLASHCORE_DESCALE_Q 12
#define FLASHCORE_DESCALE_K 13
#define FLASHCORE_DESCALE_V 14
/* Gradients, of the shapes of their tensors: the backward pass reads OUT, LSE, D_OUT and D_LSE and writes the
 * others that are given. */
#define FLASHCORE_D_OUT 15
#define FLASHCORE_DQ 16
#define FLASHCORE_DK 17
#define FLASHCORE_DV 18
#define FLASHCORE_D_LSE 19
#define FLASHCORE_D_SINKS 20
/* An append: new keys and values, which the call writes into K and V before it computes. SEQUSED_K has the
 * lengths before the append, and new row i of batch entry b becomes row SEQUSED_K[b] + i. Of the type of Q:
 * an 8-bit cache is rounded to, by its descale factors. [batch, head, row, dim]; with CU_SEQLENS_K_NEW
 * (i32, [batch + 1]) packed, with a batch extent of 1. */
#define FLASHCORE_K_NEW 21
#define FLASHCORE_V_NEW 22
#define FLASHCORE_CU_SEQLENS_K_NEW 23
/* Rotary embedding of the new keys and of Q: cosines and sines, [position, rotary dim / 2], and the position
 * of each batch entry (i32, [batch]) in place of SEQUSED_K. Q is not changed in memory. */
#define FLASHCORE_ROTARY_COS 24
#define FLASHCORE_ROTARY_SIN 25
#define FLASHCORE_ROTARY_SEQLENS 26
/* Slots of new keys and values, i32 or i64, [rows]: each is a row of the cache, counted over all pages. A
 * negative slot leaves its row out. */
#define FLASHCORE_SLOT_MAPPING 27
/* Table i of the programs, i from 0 to 7, of at most four dimensions, and its gradient. */
#define FLASHCORE_TABLE(i) (32 + (i))
#define FLASHCORE_D_TABLE(i) (40 + (i))

/* Devices, with DLPack's numbers. */
#define FLASHCORE_CPU 1
#define FLASHCORE_CUDA 2

/* Passes. */
#define FLASHCORE_FORWARD 0
#define FLASHCORE_BACKWARD 1
/* No attention: the rows of K_NEW and V_NEW, [1, head, row, dim], are written to the slots SLOT_MAPPING of the
 * caches K and V, [page, head, row, dim]. 8-bit caches have DESCALE_K and DESCALE_V, [1] or [head]. */
#define FLASHCORE_WRITE_SLOTS 2

/* Flags. A query sees at most keys_before keys before the key that is level with it. */
#define FLASHCORE_LIMIT_BEFORE 1
/* A query sees at most keys_after keys after the key that is level with it. */
#define FLASHCORE_LIMIT_AFTER 2
/* The first query is level with the first key. Without it, the last query is level with the last key. */
#define FLASHCORE_TOP_LEFT 4
/* GPUs may round f32 inputs to tf32 for products. */
#define FLASHCORE_TF32 8
/* The backward pass returns equal bits in every run. */
#define FLASHCORE_DETERMINISTIC 16
/* Dims 2 i and 2 i + 1 form a pair of the rotary embedding. Without it, i and i + rotary dim / 2 do. */
#define FLASHCORE_INTERLEAVED 32
/* The causal mask: keys_after is 0. */
#define FLASHCORE_CAUSAL FLASHCORE_LIMIT_AFTER

/* An operand in memory of the host, or of the GPU that the call names. */
typedef struct flashcore_operand {
  uint32_t operand;    /* FLASHCORE_Q ... */
  uint32_t dtype;      /* FLASHCORE_F16 ... */
  uint64_t address;    /* of the element whose indices are all 0 */
  uint64_t dimensions; /* at most 4 */
  int64_t shape[4];
  int64_t strides[4]; /* in elements; may be negative */
} flashcore_operand;

/* A call of attention. */
typedef struct flashcore_call {
  uint64_t size; /* sizeof(flashcore_call): which fields the caller knows */
  char *error;   /* receives the text of an error, with a NUL; NULL: none */
  uint64_t error_size; /* bytes of `error` */
  const flashcore_operand *operands;
  uint64_t operand_count;
  uint32_t pass;        /* FLASHCORE_FORWARD, FLASHCORE_BACKWARD */
  uint32_t flags;       /* FLASHCORE_CAUSAL ... */
  int32_t device_type;  /* FLASHCORE_CPU, FLASHCORE_CUDA */
  int32_t device;       /* ordinal of the GPU */
  uint64_t stream;      /* CUstream of the GPU's primary context; 0: the default stream */
  uint64_t threads;     /* most threads on the host; 0: one for each processor */
  int64_t keys_before;  /* with FLASHCORE_LIMIT_BEFORE */
  int64_t keys_after;   /* with FLASHCORE_LIMIT_AFTER */
  float scale;          /* factor on Q K^T; 0: 1 / sqrt(head dim) */
  float softcap;        /* upper bound of the logits' magnitude; 0: none */
  const char *score;    /* program for the score; NULL: none */
  const char *mask;     /* program for the mask; NULL: none */
  const float *floats;  /* float parameters of the programs */
  uint64_t float_count;
  const int32_t *ints; /* integer parameters of the programs */
  uint64_t int_count;
  int64_t longest_q;      /* longest packed sequence of queries, or more; 0: all rows */
  int64_t longest_k;      /* longest sequence of packed or paged keys, or more; 0: all rows */
  uint32_t scale_rows[3]; /* rows that share a descale factor of Q, K, V; 0: all */
  uint32_t reserved;      /* 0 */
} flashcore_call;

/*
 * Checks a call, and compiles and loads what it needs on a GPU. The elements of operands are not read. After
 * it, flashcore_attention of a call with equal shapes, strides, types and options neither compiles nor
 * allocates device memory, and may be captured in a graph.
 */
int32_t flashcore_prepare(const flashcore_call *call);

/*
 * Computes attention: on the host before it returns, on a GPU enqueued on the stream without waiting. Inputs
 * must be initialised; outputs overlap no other operand. In device memory, the operands stay allocated until
 * the enqueued work has run. Nothing has been written when it fails, unless the device failed.
 */
int32_t flashcore_attention(const flashcore_call *call);

/*
 * Writes the bytes of device memory that flashcore_attention uses besides the operands. The library allocates
 * that memory, once per stream and graph, and keeps it.
 */
int32_t flashcore_workspace_size(const flashcore_call *call, uint64_t *bytes);

/* The version of the library, such as "0.1.0". Any thread may call any function at any time. */
const char *flashcore_version(void);

#ifdef __cplusplus
}
#endif

#endif
