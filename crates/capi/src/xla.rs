//! Handlers for XLA's foreign function interface, by its C interface (`xla/ffi/api/c_api.h`, 0.3 and 0.4):
//! `flashcore_attn.jax` registers them in JAX. The attribute `call` has the text of a
//! [`CallSpec`](crate::spec::CallSpec), which names arguments and results in this order.
//!
//! Each struct of the interface begins with its size. Only fields that XLA 0.3 has are declared.

use std::ffi::{CString, c_char, c_void};

use flashcore::AttentionError;
use flashcore::raw::{Described, Interface, keep_call, launch_again};
use smallvec::SmallVec;

use crate::abi;
use crate::arrays::{CallTarget, guarded};
use crate::errors::invalid;
use crate::spec::{HandedCall, HandedTensor, MANY, parsed, words_of};

/// `XLA_FFI_CallFrame`.
#[repr(C)]
pub struct XlaCallFrame {
    size: usize,
    extension: *const Extension,
    api: *const Api,
    context: *mut c_void,
    stage: i32,
    arguments: Buffers,
    results: Buffers,
    attributes: Attributes,
}

/// `XLA_FFI_Args` and `XLA_FFI_Rets`.
#[repr(C)]
struct Buffers {
    size: usize,
    extension: *const Extension,
    count: i64,
    types: *const i32,
    buffers: *const *const Buffer,
}

/// `XLA_FFI_Attrs`.
#[repr(C)]
struct Attributes {
    size: usize,
    extension: *const Extension,
    count: i64,
    types: *const i32,
    names: *const *const Span,
    values: *const *const c_void,
}

/// `XLA_FFI_Buffer`, whose elements are dense.
#[repr(C)]
struct Buffer {
    size: usize,
    extension: *const Extension,
    dtype: i32,
    data: *mut c_void,
    rank: i64,
    shape: *const i64,
}

/// `XLA_FFI_ByteSpan`.
#[repr(C)]
struct Span {
    start: *const u8,
    bytes: usize,
}

/// `XLA_FFI_Extension_Base`.
#[repr(C)]
struct Extension {
    size: usize,
    kind: i32,
    next: *const Extension,
}

/// `XLA_FFI_Metadata_Extension`.
#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

/// `XLA_FFI_Metadata`.
#[repr(C)]
struct Metadata {
    size: usize,
    version: Version,
    traits: u32,
}

/// `XLA_FFI_Api_Version`.
#[repr(C)]
struct Version {
    size: usize,
    extension: *const Extension,
    major: i32,
    minor: i32,
}

/// `XLA_FFI_Api`.
#[repr(C)]
struct Api {
    size: usize,
    extension: *const Extension,
    version: Version,
    internal: *const c_void,
    create_error: unsafe extern "C" fn(*mut ErrorArguments) -> *mut c_void,
    others: [*const c_void; 3],
    stream: unsafe extern "C" fn(*mut Query<*mut c_void>) -> *mut c_void,
    more: [*const c_void; 12],
    device: unsafe extern "C" fn(*mut Query<i32>) -> *mut c_void,
}

/// `XLA_FFI_Error_Create_Args`.
#[repr(C)]
struct ErrorArguments {
    size: usize,
    extension: *const Extension,
    message: *const c_char,
    code: i32,
}

/// `XLA_FFI_Stream_Get_Args` and `XLA_FFI_DeviceOrdinal_Get_Args`.
#[repr(C)]
struct Query<T> {
    size: usize,
    extension: *const Extension,
    context: *mut c_void,
    answer: T,
}

/// The version whose structs are declared here.
const VERSION: [i32; 2] = [0, 3];
/// `XLA_FFI_Extension_Metadata`.
const METADATA: i32 = 1;
/// `XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE`: a call may be captured in a graph.
const CAPTURED: u32 = 1;
/// The stage in which a call is executed.
const EXECUTE: i32 = 3;
/// `XLA_FFI_AttrType_STRING`.
const STRING: i32 = 4;
/// Codes of errors: those of absl.
const INVALID_ARGUMENT: i32 = 3;
const UNIMPLEMENTED: i32 = 12;
const INTERNAL: i32 = 13;

/// `XLA_FFI_DataType` with the numbers of `flashcore.h`.
const TYPES: [(i32, u32); 9] = [
    (11, abi::F32),
    (10, abi::F16),
    (16, abi::BF16),
    (20, abi::E4M3),
    (19, abi::E5M2),
    (4, abi::I32),
    (5, abi::I64),
    (6, abi::U8),
    (1, abi::U8), // predicates
];

/// A call as XLA describes it.
struct FrameCall<'a> {
    /// The number of the GPU.
    ordinal: i32,
    text: &'a [u8],
    /// Arguments, and then results.
    buffers: [&'a [*const Buffer]; 2],
}

impl<'a> FrameCall<'a> {
    fn all(&self) -> impl Iterator<Item = &'a Buffer> {
        // SAFETY: the buffers are those of a frame of XLA, which lives longer than this call.
        self.buffers.into_iter().flatten().map(|&buffer| unsafe { &*buffer })
    }
}

impl Described for FrameCall<'_> {
    fn interface(&self) -> Interface {
        Interface::Xla
    }

    #[inline]
    fn words(&self, mut next: impl FnMut(&[u64]) -> bool) -> bool {
        words_of(self.text, self.ordinal as u64, &mut next)
            && self.all().all(|buffer| {
                let shape = buffer.shape();
                next(&[(buffer.dtype as u64) << 32 | shape.len() as u64])
                    && shape.iter().all(|&extent| next(&[extent as u64]))
            })
    }

    #[inline]
    fn address(&self, index: usize) -> u64 {
        let [arguments, results] = self.buffers;
        let buffer = arguments.get(index).unwrap_or_else(|| &results[index - arguments.len()]);
        // SAFETY: as in `all`.
        unsafe { (**buffer).address() }
    }
}

/// The handler in host memory.
///
/// # Safety
/// `frame` is a call frame of XLA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_xla_host(frame: *const XlaCallFrame) -> *mut c_void {
    // SAFETY: this function's own contract.
    unsafe { handle(&*frame, |_| Ok(None)) }
}

/// The handler on CUDA devices. It has no stage before the execution, which XLA would run before each: the
/// first execution of a call prepares it.
///
/// # Safety
/// `frame` is a call frame of XLA.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashcore_xla_cuda(frame: *const XlaCallFrame) -> *mut c_void {
    let stream = |frame: &XlaCallFrame| {
        // SAFETY: the frame's functions take its context.
        unsafe {
            let (api, context) = (&*frame.api, frame.context);
            let stream = ask(api.stream, context, std::ptr::null_mut())?;
            Ok(Some((ask(api.device, context, 0)?, stream.expose_provenance() as u64)))
        }
    };
    // SAFETY: this function's own contract.
    unsafe { handle(&*frame, stream) }
}

/// # Safety
/// The function takes such a query of the context.
unsafe fn ask<T>(
    function: unsafe extern "C" fn(*mut Query<T>) -> *mut c_void,
    context: *mut c_void,
    none: T,
) -> Result<T, AttentionError> {
    let size = std::mem::offset_of!(Query<T>, answer) + size_of::<T>();
    let mut query = Query { size, extension: std::ptr::null(), context, answer: none };
    // SAFETY: this function's own contract.
    match unsafe { function(&mut query) }.is_null() {
        true => Ok(query.answer),
        false => Err(invalid("the call", "platform", "one without streams", "CUDA")),
    }
}

/// `stream` is the number of the GPU and the driver's handle of the stream; `None` in host memory.
///
/// # Safety
/// The frame is one of XLA.
unsafe fn handle(
    frame: &XlaCallFrame,
    stream: impl FnOnce(&XlaCallFrame) -> Result<Option<(i32, u64)>, AttentionError>,
) -> *mut c_void {
    // SAFETY: this function's own contract; an extension lives as long as its frame.
    if unsafe { answer_query(frame.extension) } || frame.stage != EXECUTE {
        return std::ptr::null_mut();
    }
    let called = guarded(|| {
        // SAFETY: this function's own contract.
        let (text, buffers) =
            unsafe { (text(&frame.attributes)?, [frame.arguments.all(), frame.results.all()]) };
        let stream = stream(frame)?;
        let call = FrameCall { ordinal: stream.map_or(-1, |(ordinal, _)| ordinal), text, buffers };
        if let Some((_, handle)) = stream
            // SAFETY: XLA's buffers have their shapes, and live until the stream's work has run.
            && let Some(launched) = unsafe { launch_again(&call, handle) }
        {
            return launched;
        }
        let spec = parsed(text)?;
        let handed = call.all().enumerate().map(|(index, buffer)| buffer.handed(spec.name(index)));
        let tensors: SmallVec<[HandedTensor<'_>; MANY]> = handed.collect::<Result<_, _>>()?;
        let place = match stream {
            Some((ordinal, handle)) => CallTarget::Stream { ordinal, handle },
            None => CallTarget::Host(spec.threads),
        };
        HandedCall { text, spec: &spec, place, tensors: &tensors }.with_ready(|ready| {
            // SAFETY: as above.
            unsafe { ready.enqueue()? };
            if stream.is_some() {
                keep_call(&call, spec.operands(), ready);
            }
            Ok(())
        })
    });
    let Err((code, message)) = called else { return std::ptr::null_mut() };
    let code = match code {
        abi::INVALID => INVALID_ARGUMENT,
        abi::UNSUPPORTED => UNIMPLEMENTED,
        _ => INTERNAL,
    };
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    let size = std::mem::offset_of!(ErrorArguments, code) + size_of::<i32>();
    let mut arguments = ErrorArguments { size, extension: std::ptr::null(), message: message.as_ptr(), code };
    // SAFETY: the function copies the message.
    unsafe { ((*frame.api).create_error)(&mut arguments) }
}

/// Answers a query of the version and the traits. Returns whether the frame is such a query.
///
/// # Safety
/// The extension is null or one of XLA.
unsafe fn answer_query(extension: *const Extension) -> bool {
    // SAFETY: this function's own contract.
    unsafe {
        if extension.is_null() || (*extension).kind != METADATA {
            return false;
        }
        let metadata = &mut *(*extension.cast::<MetadataExtension>()).metadata;
        [metadata.version.major, metadata.version.minor] = VERSION;
        metadata.traits = CAPTURED;
        true
    }
}

/// The text of the attribute `call`.
///
/// # Safety
/// The attributes are those of XLA.
unsafe fn text<'a>(attributes: &Attributes) -> Result<&'a [u8], AttentionError> {
    for index in 0..usize::try_from(attributes.count).unwrap_or(0) {
        // SAFETY: this function's own contract.
        unsafe {
            let name = (**attributes.names.add(index)).bytes();
            if name == b"call" && *attributes.types.add(index) == STRING {
                return Ok((*(*attributes.values.add(index)).cast::<Span>()).bytes());
            }
        }
    }
    Err(invalid("the attribute 'call'", "type", "none", "a string: the names of the tensors"))
}

impl Span {
    /// # Safety
    /// The bytes are there, longer than their user needs them.
    unsafe fn bytes<'a>(&self) -> &'a [u8] {
        match self.bytes {
            0 => &[],
            // SAFETY: this function's own contract.
            bytes => unsafe { std::slice::from_raw_parts(self.start, bytes) },
        }
    }
}

impl Buffers {
    /// # Safety
    /// The buffers are those of XLA.
    unsafe fn all(&self) -> &[*const Buffer] {
        match usize::try_from(self.count) {
            // SAFETY: this function's own contract.
            Ok(count @ 1..) => unsafe { std::slice::from_raw_parts(self.buffers, count) },
            _ => &[],
        }
    }
}

impl Buffer {
    fn shape(&self) -> &[i64] {
        match usize::try_from(self.rank) {
            // SAFETY: a buffer of XLA has so many extents.
            Ok(rank @ 1..) => unsafe { std::slice::from_raw_parts(self.shape, rank) },
            _ => &[],
        }
    }

    fn address(&self) -> u64 {
        self.data.expose_provenance() as u64
    }

    fn handed(&self, name: &'static str) -> Result<HandedTensor<'_>, AttentionError> {
        let dtype = TYPES.iter().find(|(number, _)| *number == self.dtype);
        let expected = "f32, f16, bf16, f8e4m3fn, f8e5m2, s32, s64, u8 or pred";
        let (_, dtype) =
            dtype.ok_or_else(|| invalid(name, "type", format!("XLA's {}", self.dtype), expected))?;
        Ok(HandedTensor { dtype: *dtype, address: self.address(), shape: self.shape(), strides: None })
    }
}
