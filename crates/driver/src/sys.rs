//! The part of the CUDA driver's C interface that this crate uses, as `cuda.h` of CUDA 12.0 declares it.
//!
//! Every C enum is a `u32` here. A later driver may return or write a number that today's declarations do not
//! name. Such a number would be undefined behaviour in a Rust `enum`.
#![allow(unsafe_code, non_snake_case, reason = "the CUDA driver's C interface under its own names")]
#![allow(clippy::too_many_arguments, reason = "those of the driver's functions")]

use std::ffi::{c_char, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::TensorMap;

/// The return type of the driver's functions.
pub(crate) type CUresult = u32;
pub(crate) type CUdevice = i32;
pub(crate) type CUhostFn = unsafe extern "C" fn(*mut c_void);

macro_rules! handles {
    ($($name:ident: $pointee:ident;)*) => {
        $(/// An opaque type of the driver. Its contents are neither read nor written here.
        #[repr(C)]
        pub(crate) struct $pointee(());
        pub(crate) type $name = *mut $pointee;)*
    };
}

handles! {
    CUcontext: Context;
    CUevent: Event;
    CUfunction: Function;
    CUgraph: Graph;
    CUgraphExec: GraphExec;
    CUgraphNode: GraphNode;
    CUlinkState: LinkState;
    CUmemoryPool: MemoryPool;
    CUmodule: Module;
    CUstream: Stream;
    CUuserObject: UserObject;
}

macro_rules! constants {
    ($($name:ident = $value:literal;)*) => { $(pub(crate) const $name: u32 = $value;)* };
}

constants! {
    CUDA_SUCCESS = 0;
    CUDA_ERROR_OUT_OF_MEMORY = 2;
    CUDA_ERROR_NOT_INITIALIZED = 3;
    CUDA_ERROR_NO_DEVICE = 100;
    CUDA_ERROR_INVALID_IMAGE = 200;
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209;
    CUDA_ERROR_ECC_UNCORRECTABLE = 214;
    CUDA_ERROR_INVALID_PTX = 218;
    CUDA_ERROR_NVLINK_UNCORRECTABLE = 220;
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222;
    CUDA_ERROR_CONTAINED = 226;
    CUDA_ERROR_INVALID_SOURCE = 300;
    CUDA_ERROR_NOT_READY = 600;
    CUDA_ERROR_ILLEGAL_ADDRESS = 700;
    CUDA_ERROR_LAUNCH_TIMEOUT = 702;
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709;
    CUDA_ERROR_ASSERT = 710;
    CUDA_ERROR_HARDWARE_STACK_ERROR = 714;
    CUDA_ERROR_ILLEGAL_INSTRUCTION = 715;
    CUDA_ERROR_MISALIGNED_ADDRESS = 716;
    CUDA_ERROR_INVALID_ADDRESS_SPACE = 717;
    CUDA_ERROR_INVALID_PC = 718;
    CUDA_ERROR_LAUNCH_FAILED = 719;
    CUDA_ERROR_TENSOR_MEMORY_LEAK = 721;
    CUDA_ERROR_NOT_PERMITTED = 800;

    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16;
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38;
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75;
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81;
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97;
    CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED = 115;

    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0;
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1;
    CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3;
    CU_FUNC_ATTRIBUTE_NUM_REGS = 4;
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;
    CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14;

    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4;
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6;

    CU_JIT_INPUT_PTX = 1;
    CU_JIT_ERROR_LOG_BUFFER = 5;
    CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6;
    CU_JIT_TARGET = 9;

    CU_EVENT_DEFAULT = 0;
    CU_EVENT_DISABLE_TIMING = 2;
    CU_STREAM_NON_BLOCKING = 1;
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1;
    CU_STREAM_CAPTURE_MODE_RELAXED = 2;
    CU_STREAM_CAPTURE_STATUS_NONE = 0;
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1;
    CU_USER_OBJECT_NO_DESTRUCTOR_SYNC = 1;
    CU_GRAPH_USER_OBJECT_MOVE = 1;

    CU_MEM_ALLOCATION_TYPE_PINNED = 1;
    CU_MEM_LOCATION_TYPE_DEVICE = 1;
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4;

    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0;
    CU_TENSOR_MAP_DATA_TYPE_UINT16 = 1;
    CU_TENSOR_MAP_DATA_TYPE_UINT32 = 2;
    CU_TENSOR_MAP_DATA_TYPE_INT32 = 3;
    CU_TENSOR_MAP_DATA_TYPE_UINT64 = 4;
    CU_TENSOR_MAP_DATA_TYPE_INT64 = 5;
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6;
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7;
    CU_TENSOR_MAP_DATA_TYPE_FLOAT64 = 8;
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9;
    CU_TENSOR_MAP_INTERLEAVE_NONE = 0;
    CU_TENSOR_MAP_SWIZZLE_NONE = 0;
    CU_TENSOR_MAP_SWIZZLE_32B = 1;
    CU_TENSOR_MAP_SWIZZLE_64B = 2;
    CU_TENSOR_MAP_SWIZZLE_128B = 3;
    CU_TENSOR_MAP_L2_PROMOTION_NONE = 0;
    CU_TENSOR_MAP_L2_PROMOTION_L2_64B = 1;
    CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2;
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3;
    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0;
}

#[repr(C)]
pub(crate) struct CUuuid {
    pub(crate) bytes: [u8; 16],
}

/// A launch attribute: its number, and a value of 64 bytes. A cluster uses three words of the value, a flag
/// one.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CUlaunchAttribute {
    pub(crate) id: u32,
    pub(crate) pad: u32,
    pub(crate) value: [u32; 16],
}

#[repr(C)]
pub(crate) struct CUlaunchConfig {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) stream: CUstream,
    pub(crate) attributes: *mut CUlaunchAttribute,
    pub(crate) count: u32,
}

#[repr(C)]
pub(crate) struct CUmemPoolProps {
    pub(crate) allocation_type: u32,
    pub(crate) handle_types: u32,
    pub(crate) location_type: u32,
    pub(crate) location_id: i32,
    pub(crate) security_attributes: *mut c_void,
    /// Must be zero.
    pub(crate) reserved: [u8; 64],
}

/// Declares functions of the driver. Each becomes a Rust function of the same name. Functions of the first
/// list must exist in the library.
macro_rules! functions {
    (
        needed { $($needed:ident($($arg:ident: $type:ty),* $(,)?);)* }
        later { $($later:ident($($later_arg:ident: $later_type:ty),* $(,)?);)* }
    ) => {
        struct Api {
            $($needed: unsafe extern "C" fn($($type),*) -> CUresult,)*
            $($later: Option<unsafe extern "C" fn($($later_type),*) -> CUresult>,)*
        }

        impl Api {
            /// The functions of a library, or the name of the first that is missing.
            ///
            /// # Safety
            /// The library must be a CUDA driver of version 12.0 or later.
            unsafe fn of(library: &Library) -> Result<Api, &'static str> {
                Ok(Api {
                    // SAFETY: the driver's function with this name has the type declared here.
                    $($needed: unsafe { symbol_of(library, stringify!($needed)) }.ok_or(stringify!($needed))?,)*
                    // SAFETY: as above.
                    $($later: unsafe { symbol_of(library, stringify!($later)) },)*
                })
            }
        }

        $(pub(crate) unsafe fn $needed($($arg: $type),*) -> CUresult {
            match API.get() {
                // SAFETY: the caller fulfils the function's contract.
                Some(api) => unsafe { (api.$needed)($($arg),*) },
                None => CUDA_ERROR_NOT_INITIALIZED,
            }
        })*
        $(pub(crate) unsafe fn $later($($later_arg: $later_type),*) -> Option<CUresult> {
            // SAFETY: the caller fulfils the function's contract.
            API.get()?.$later.map(|function| unsafe { function($($later_arg),*) })
        })*
    };
}

functions! {
    needed {
        cuCtxGetCurrent(context: *mut CUcontext);
        cuCtxResetPersistingL2Cache();
        cuCtxSetCurrent(context: CUcontext);
        cuCtxSynchronize();
        cuDeviceGet(device: *mut CUdevice, ordinal: i32);
        cuDeviceGetAttribute(value: *mut i32, attribute: u32, device: CUdevice);
        cuDeviceGetCount(count: *mut i32);
        cuDeviceGetName(name: *mut c_char, len: i32, device: CUdevice);
        cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
        cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
        cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
        cuEventCreate(event: *mut CUevent, flags: u32);
        cuEventDestroy_v2(event: CUevent);
        cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
        cuEventQuery(event: CUevent);
        cuEventRecord(event: CUevent, stream: CUstream);
        cuEventSynchronize(event: CUevent);
        cuFuncGetAttribute(value: *mut i32, attribute: u32, function: CUfunction);
        cuFuncSetAttribute(function: CUfunction, attribute: u32, value: i32);
        cuGraphDestroy(graph: CUgraph);
        cuGraphExecDestroy(exec: CUgraphExec);
        cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: u64);
        cuGraphLaunch(exec: CUgraphExec, stream: CUstream);
        cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: u32, flags: u32);
        cuInit(flags: u32);
        cuLaunchKernelEx(
            config: *const CUlaunchConfig,
            function: CUfunction,
            kernel_params: *mut *mut c_void,
            extra: *mut *mut c_void,
        );
        cuLinkAddData_v2(
            state: CUlinkState,
            kind: u32,
            data: *mut c_void,
            size: usize,
            name: *const c_char,
            count: u32,
            options: *mut u32,
            values: *mut *mut c_void,
        );
        cuLinkComplete(state: CUlinkState, cubin: *mut *mut c_void, size: *mut usize);
        cuLinkCreate_v2(
            count: u32,
            options: *mut u32,
            values: *mut *mut c_void,
            state: *mut CUlinkState,
        );
        cuLinkDestroy(state: CUlinkState);
        cuMemAllocFromPoolAsync(address: *mut u64, bytes: usize, pool: CUmemoryPool, stream: CUstream);
        cuMemAlloc_v2(address: *mut u64, bytes: usize);
        cuMemFreeAsync(address: u64, stream: CUstream);
        cuMemFreeHost(start: *mut c_void);
        cuMemFree_v2(address: u64);
        cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        cuMemHostAlloc(start: *mut *mut c_void, bytes: usize, flags: u32);
        cuMemPoolCreate(pool: *mut CUmemoryPool, pool_props: *const CUmemPoolProps);
        cuMemPoolDestroy(pool: CUmemoryPool);
        cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: u32, value: *mut c_void);
        cuMemPoolTrimTo(pool: CUmemoryPool, min_bytes_to_keep: usize);
        cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: CUstream);
        cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: CUstream);
        cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize);
        cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: CUstream);
        cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize);
        cuMemsetD32Async(to: u64, word: u32, count: usize, stream: CUstream);
        cuMemsetD8Async(to: u64, byte: u8, count: usize, stream: CUstream);
        cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
        cuModuleLoadDataEx(
            module: *mut CUmodule,
            image: *const c_void,
            count: u32,
            options: *mut u32,
            values: *mut *mut c_void,
        );
        cuModuleUnload(module: CUmodule);
        cuOccupancyMaxActiveBlocksPerMultiprocessor(
            num_blocks: *mut i32,
            function: CUfunction,
            block_size: i32,
            dynamic_smem_size: usize,
        );
        cuStreamBeginCapture_v2(stream: CUstream, mode: u32);
        cuStreamCreate(stream: *mut CUstream, flags: u32);
        cuStreamDestroy_v2(stream: CUstream);
        cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
        cuStreamGetCaptureInfo_v2(
            stream: CUstream,
            status: *mut u32,
            id: *mut u64,
            graph: *mut CUgraph,
            dependencies: *mut *const CUgraphNode,
            num_dependencies: *mut usize,
        );
        cuStreamGetId(stream: CUstream, stream_id: *mut u64);
        cuStreamIsCapturing(stream: CUstream, status: *mut u32);
        cuStreamQuery(stream: CUstream);
        cuStreamSynchronize(stream: CUstream);
        cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32);
        cuTensorMapEncodeTiled(
            tensor_map: *mut TensorMap,
            tensor_data_type: u32,
            tensor_rank: u32,
            global_address: *mut c_void,
            global_dim: *const u64,
            global_strides: *const u64,
            box_dim: *const u32,
            element_strides: *const u32,
            interleave: u32,
            swizzle: u32,
            l2_promotion: u32,
            oob_fill: u32,
        );
        cuThreadExchangeStreamCaptureMode(mode: *mut u32);
        cuUserObjectCreate(
            object: *mut CUuserObject,
            ptr: *mut c_void,
            destroy: CUhostFn,
            initial_refcount: u32,
            flags: u32,
        );
        cuUserObjectRelease(object: CUuserObject, count: u32);
    }
    // Since CUDA 12.4.
    later {
        cuFuncLoad(function: CUfunction);
    }
}

static LIBRARY: OnceLock<Library> = OnceLock::new();
static API: OnceLock<Api> = OnceLock::new();

/// The driver's library, loaded once and never unloaded. `None` if it cannot be loaded.
pub(crate) fn library() -> Option<&'static Library> {
    if let Some(library) = LIBRARY.get() {
        return Some(library);
    }
    let names: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };
    // SAFETY: loading the driver's library runs no code that affects Rust code.
    let library = names.iter().find_map(|name| unsafe { Library::new(name) }.ok())?;
    Some(LIBRARY.get_or_init(|| library))
}

/// Looks up all functions in the library.
///
/// # Errors
/// The name of a missing function.
///
/// # Safety
/// The library must be a CUDA driver of version 12.0 or later.
pub(crate) unsafe fn link(library: &Library) -> Result<(), &'static str> {
    // SAFETY: as the caller guarantees.
    let api = unsafe { Api::of(library) }?;
    API.get_or_init(|| api);
    Ok(())
}

/// A function of the library, if it exists.
///
/// # Safety
/// `F` must be the type of the function with this name.
pub(crate) unsafe fn symbol_of<F: Copy>(library: &Library, name: &str) -> Option<F> {
    // SAFETY: as the caller guarantees. The library is never unloaded, so the address stays valid.
    unsafe { library.get::<F>(name.as_bytes()) }.ok().map(|symbol| *symbol)
}

#[cfg(test)]
mod tests {
    use std::mem::{align_of, offset_of, size_of};

    use super::*;

    /// Sizes and offsets as a C compiler lays out the structs of `cuda.h` on 64-bit machines.
    #[test]
    fn structs_are_laid_out_as_in_c() {
        assert_eq!((size_of::<CUlaunchAttribute>(), align_of::<CUlaunchAttribute>()), (72, 8));
        assert_eq!(offset_of!(CUlaunchAttribute, value), 8);
        assert_eq!(size_of::<CUlaunchConfig>(), 56);
        assert_eq!(
            [
                offset_of!(CUlaunchConfig, block),
                offset_of!(CUlaunchConfig, shared_bytes),
                offset_of!(CUlaunchConfig, stream),
                offset_of!(CUlaunchConfig, attributes),
                offset_of!(CUlaunchConfig, count),
            ],
            [12, 24, 32, 40, 48]
        );
        assert_eq!(size_of::<CUmemPoolProps>(), 88);
        assert_eq!(
            [
                offset_of!(CUmemPoolProps, location_type),
                offset_of!(CUmemPoolProps, security_attributes),
                offset_of!(CUmemPoolProps, reserved),
            ],
            [8, 16, 24]
        );
        assert_eq!(size_of::<CUuuid>(), 16);
    }
}
