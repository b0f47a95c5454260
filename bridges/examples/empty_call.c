/*
 * Empty foreign functions of XLA, whose calls `overhead.py` compares with calls of attention: one does nothing,
 * the other launches an empty kernel on a CUDA device.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <xla/ffi/api/c_api.h>

static const char kernel[] =
    ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry empty() { ret; }\n";

static int (*launch)(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                     void *stream, void **parameters, void **extra);
static void *function;

static int answers_query(XLA_FFI_CallFrame *frame) {
  /* The type of an extension has another name since version 0.4 of the interface. */
  if (frame->extension_start == NULL || frame->extension_start->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
  return 1;
}

static XLA_FFI_Error *failed(XLA_FFI_CallFrame *frame, const char *message) {
  XLA_FFI_Error_Create_Args args = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE, .message = message,
                                    .errc = XLA_FFI_Error_Code_INTERNAL};
  return frame->api->XLA_FFI_Error_Create(&args);
}

/* The kernel of the current context. */
static const char *load(void) {
  void *module, *driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == NULL) return "no libcuda.so.1";
  int (*load_data)(void **, const void *) = (int (*)(void **, const void *))dlsym(driver, "cuModuleLoadData");
  int (*find)(void **, void *, const char *) =
      (int (*)(void **, void *, const char *))dlsym(driver, "cuModuleGetFunction");
  *(void **)&launch = dlsym(driver, "cuLaunchKernel");
  if (load_data == NULL || find == NULL || launch == NULL) return "a function of the driver is missing";
  if (load_data(&module, kernel) || find(&function, module, "empty")) return "the kernel does not load";
  return NULL;
}

XLA_FFI_Error *empty_host(XLA_FFI_CallFrame *frame) {
  answers_query(frame);
  return NULL;
}

XLA_FFI_Error *empty_cuda(XLA_FFI_CallFrame *frame) {
  if (answers_query(frame)) return NULL;
  const char *problem = function ? NULL : load();
  if (problem != NULL) return failed(frame, problem);
  XLA_FFI_Stream_Get_Args args = {.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE, .ctx = frame->ctx};
  XLA_FFI_Error *error = frame->api->XLA_FFI_Stream_Get(&args);
  if (error != NULL) return error;
  if (launch(function, 1, 1, 1, 32, 1, 1, 0, args.stream, NULL, NULL)) return failed(frame, "no launch");
  return NULL;
}
