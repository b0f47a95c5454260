/*
 * Calls the handler for CUDA devices as XLA does, with a driver that needs no GPU: a query of the version, a
 * first execution while the stream is captured, executions, and calls that are refused. The argument is the
 * library.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xla/ffi/api/c_api.h>

#define CHECK(condition) \
  if (!(condition)) fprintf(stderr, "line %d: %s\n", __LINE__, #condition), exit(1)

enum { HEADS = 2, ROWS = 128, DIM = 64, BYTES = 2 * HEADS * ROWS * DIM };

static void *stream_of_call;
static char told[512];
static int code;

static XLA_FFI_Error *create_error(XLA_FFI_Error_Create_Args *args) {
  CHECK(args->struct_size == XLA_FFI_Error_Create_Args_STRUCT_SIZE);
  code = args->errc;
  snprintf(told, sizeof told, "%s", args->message);
  return (XLA_FFI_Error *)told;
}

static XLA_FFI_Error *get_stream(XLA_FFI_Stream_Get_Args *args) {
  CHECK(args->struct_size == XLA_FFI_Stream_Get_Args_STRUCT_SIZE && args->ctx == (void *)told);
  args->stream = stream_of_call;
  return NULL;
}

static XLA_FFI_Error *get_ordinal(XLA_FFI_DeviceOrdinal_Get_Args *args) {
  CHECK(args->struct_size == XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE && args->ctx == (void *)told);
  args->device_ordinal = 0;
  return NULL;
}

static void *found(void *library, const char *name) {
  void *symbol = dlsym(library, name);
  CHECK(symbol != NULL);
  return symbol;
}

int main(int count, char **arguments) {
  CHECK(count == 2);
  void *driver = dlopen("libcuda.so.1", RTLD_NOW), *library = dlopen(arguments[1], RTLD_NOW);
  CHECK(driver != NULL && library != NULL);
  XLA_FFI_Handler *handler = (XLA_FFI_Handler *)found(library, "flashcore_xla_cuda");
  int (*init)(unsigned) = found(driver, "cuInit");
  int (*retain)(void **, int) = found(driver, "cuDevicePrimaryCtxRetain");
  int (*set)(void *) = found(driver, "cuCtxSetCurrent");
  int (*create)(void **, unsigned) = found(driver, "cuStreamCreate");
  int (*begin)(void *, int) = found(driver, "cuStreamBeginCapture_v2");
  int (*end)(void *, void **) = found(driver, "cuStreamEndCapture");
  int (*allocate)(unsigned long long *, size_t) = found(driver, "cuMemAlloc_v2");
  void (*counts)(size_t *, size_t *, size_t *) = found(driver, "fake_counts");
  void *context, *graph;
  unsigned long long memory[4];
  CHECK(!init(0) && !retain(&context, 0) && !set(context) && !create(&stream_of_call, 1));

  int64_t shape[] = {1, ROWS, HEADS, DIM};
  XLA_FFI_Buffer buffers[4];
  void *pointers[4];
  XLA_FFI_ArgType types[4] = {XLA_FFI_ArgType_BUFFER, XLA_FFI_ArgType_BUFFER, XLA_FFI_ArgType_BUFFER};
  XLA_FFI_RetType result_types[1] = {XLA_FFI_RetType_BUFFER};
  for (int i = 0; i < 4; i++) {
    CHECK(!allocate(&memory[i], BYTES));
    buffers[i] = (XLA_FFI_Buffer){.struct_size = XLA_FFI_Buffer_STRUCT_SIZE, .dtype = XLA_FFI_DataType_BF16,
                                  .data = (void *)(uintptr_t)memory[i], .rank = 4, .dims = shape};
    pointers[i] = &buffers[i];
  }
  const char *text = "q k v out; causal";
  XLA_FFI_ByteSpan name = {"call", 4}, value = {text, strlen(text)}, *names[] = {&name};
  void *values[] = {&value};
  XLA_FFI_AttrType attribute_types[] = {XLA_FFI_AttrType_STRING};
  XLA_FFI_Api api = {.struct_size = XLA_FFI_Api_STRUCT_SIZE, .XLA_FFI_Error_Create = create_error,
                     .XLA_FFI_Stream_Get = get_stream, .XLA_FFI_DeviceOrdinal_Get = get_ordinal};
  XLA_FFI_CallFrame frame = {
      .struct_size = XLA_FFI_CallFrame_STRUCT_SIZE, .api = &api, .ctx = (void *)told,
      .args = {.struct_size = XLA_FFI_Args_STRUCT_SIZE, .size = 3, .types = types, .args = pointers},
      .rets = {.struct_size = XLA_FFI_Rets_STRUCT_SIZE, .size = 1, .types = result_types, .rets = pointers + 3},
      .attrs = {.struct_size = XLA_FFI_Attrs_STRUCT_SIZE, .size = 1, .types = attribute_types, .names = names,
                .attrs = values}};

  XLA_FFI_Metadata metadata = {.struct_size = XLA_FFI_Metadata_STRUCT_SIZE};
  XLA_FFI_Metadata_Extension query = {{XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata, NULL},
                                      &metadata};
  frame.extension_start = &query.extension_base;
  CHECK(handler(&frame) == NULL && metadata.api_version.major_version == XLA_FFI_API_MAJOR);
  /* The library declares the structs of 0.3, to which later minor versions add. */
  CHECK(metadata.api_version.minor_version == 3 && XLA_FFI_API_MINOR >= 3);
  CHECK(metadata.traits == XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);

  frame.extension_start = NULL;
  size_t live, launches, linked, before;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  counts(&live, &before, &linked);
  CHECK(linked == 0 && !begin(stream_of_call, 1));
  if (handler(&frame) != NULL) fprintf(stderr, "%s\n", told), exit(1);
  CHECK(!end(stream_of_call, &graph));
  counts(&live, &launches, &linked);
  CHECK(launches == before && linked > 0);
  CHECK(handler(&frame) == NULL);
  counts(&live, &launches, &linked);
  CHECK(launches == before + 1);

  /* Again on other addresses, which need not be checked as the first were, but must be there. */
  buffers[0].data = (void *)(uintptr_t)memory[1];
  CHECK(handler(&frame) == NULL);
  counts(&live, &launches, &linked);
  CHECK(launches == before + 2);
  buffers[0].data = NULL;
  CHECK(handler(&frame) == (XLA_FFI_Error *)told);
  puts(told);
  buffers[0].data = (void *)(uintptr_t)memory[0];

  buffers[1].dtype = XLA_FFI_DataType_F64;
  CHECK(handler(&frame) == (XLA_FFI_Error *)told && code == XLA_FFI_Error_Code_INVALID_ARGUMENT);
  puts(told);
  return 0;
}
