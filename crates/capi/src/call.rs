//! A `flashcore_call` as the operands and options of [`flashcore::raw`].

use std::ffi::{CStr, c_char};
use std::mem::{offset_of, size_of};

use flashcore::gpu::Operand;
use flashcore::raw::{CallOptions, Described, Interface, Tensor, View};
use flashcore::{AttentionError, Band, Corner, Program};

use crate::abi::{self, CCall, COperand, CallArray};
use crate::arrays::{CallArrays, CallTarget, pass};
use crate::errors::{ErrorBuffer, invalid};

/// Copies the call. A caller with an older header has fewer fields, and the others are zero; a caller with a
/// newer one has more, which must be zero.
///
/// # Safety
/// `call` is null or the address of a `flashcore_call` of `size` bytes.
pub unsafe fn read(call: *const CCall) -> Result<CCall, AttentionError> {
    const OLDEST: usize = size_of::<CCall>();
    if call.is_null() || !call.is_aligned() {
        let accepted = "the address of a flashcore_call, a multiple of 8";
        return Err(invalid("call", "address", format!("{call:p}"), accepted));
    }
    // SAFETY: each call begins with its size.
    let size = unsafe { call.cast::<u64>().read() };
    let expected = || format!("sizeof(flashcore_call), {OLDEST} or more");
    let size = usize::try_from(size).ok().filter(|&size| (OLDEST..1 << 16).contains(&size));
    let size = size.ok_or_else(|| {
        // SAFETY: as above.
        invalid("call", "size", unsafe { call.cast::<u64>().read() }, expected())
    })?;
    // SAFETY: the caller states that there are so many bytes.
    let bytes = unsafe { std::slice::from_raw_parts(call.cast::<u8>(), size) };
    if let Some(at) = bytes[OLDEST..].iter().position(|&byte| byte != 0) {
        let expected = "zero: a field that this version of the library does not know";
        return Err(invalid("call", "byte", format!("{} at {}", bytes[OLDEST + at], OLDEST + at), expected));
    }
    // SAFETY: all fields that this version knows are there, and every bit pattern is valid.
    Ok(unsafe { call.read() })
}

/// Where the error of a call goes, also if the call is not valid otherwise.
///
/// # Safety
/// As [`read`].
pub unsafe fn error_buffer(call: *const CCall) -> ErrorBuffer {
    const END: usize = offset_of!(CCall, error_size) + size_of::<u64>();
    // SAFETY: the fields are read if the call has them, by this function's contract.
    unsafe {
        if call.is_null() || !call.is_aligned() || call.cast::<u64>().read() < END as u64 {
            return ErrorBuffer::NONE;
        }
        let bytes = usize::try_from((*call).error_size).unwrap_or(usize::MAX);
        ErrorBuffer { start: (*call).error, bytes }
    }
}

/// The elements of an array of the call.
///
/// # Safety
/// If `start` is not null, `count` elements lie there.
unsafe fn array<'a, T>(
    argument: &'static str,
    start: *const T,
    count: u64,
    most: u64,
) -> Result<&'a [T], AttentionError> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > most {
        return Err(invalid(argument, "number of elements", count, format!("at most {most}")));
    }
    if start.is_null() || !start.is_aligned() {
        let expected = format!("the address of {count} elements");
        return Err(invalid(argument, "address", format!("{start:p}"), expected));
    }
    // SAFETY: the elements lie there, by this function's contract.
    Ok(unsafe { std::slice::from_raw_parts(start, count as usize) })
}

/// The operands of a call.
///
/// # Safety
/// `operand_count` operands lie at `operands`.
unsafe fn operands(call: &CCall) -> Result<&[COperand], AttentionError> {
    // SAFETY: this function's own contract.
    unsafe { array("operands", call.operands, call.operand_count, 64) }
}

/// A call on a GPU that refers to no texts or numbers in memory, which can change between calls.
pub struct PlainCall<'a> {
    call: &'a CCall,
    operands: &'a [COperand],
}

impl PlainCall<'_> {
    /// `None` for another call.
    ///
    /// # Safety
    /// As [`operands`].
    pub unsafe fn of(call: &CCall) -> Option<PlainCall<'_>> {
        let is_plain =
            call.score.is_null() && call.mask.is_null() && call.float_count == 0 && call.int_count == 0;
        if call.device_type != abi::CUDA || !is_plain {
            return None;
        }
        // SAFETY: this function's own contract.
        Some(PlainCall { call, operands: unsafe { operands(call).ok()? } })
    }

    /// Which operand of the pass each array is.
    pub fn passed(&self) -> impl Iterator<Item = Option<Operand>> {
        self.operands.iter().map(|entry| abi::array(entry.operand)?.operand())
    }
}

impl Described for PlainCall<'_> {
    fn interface(&self) -> Interface {
        Interface::C
    }

    #[inline]
    fn words(&self, mut next: impl FnMut(&[u64]) -> bool) -> bool {
        next(&self.call.words()) && self.operands.iter().all(|entry| next(&entry.words()))
    }

    #[inline]
    fn address(&self, index: usize) -> u64 {
        self.operands[index].address
    }
}

/// The arrays of a call.
///
/// # Safety
/// `operand_count` operands lie at `operands`.
pub unsafe fn arrays(call: &CCall) -> Result<CallArrays, AttentionError> {
    // SAFETY: this function's own contract.
    let given = unsafe { operands(call)? };
    let mut arrays = CallArrays::default();
    for entry in given {
        let array = abi::array(entry.operand).ok_or_else(|| {
            let expected = "FLASHCORE_Q or another of flashcore.h";
            invalid("operands", "number of an operand", entry.operand, expected)
        })?;
        match (array, usize::try_from(entry.dimensions)) {
            (CallArray::Slots, Ok(count @ 0..=4)) => {
                let (shape, strides) = (&entry.shape[..count], &entry.strides[..count]);
                arrays.insert_slots(entry.address, entry.dtype, shape, Some(strides))?;
            }
            _ => arrays.insert(array, Tensor { address: entry.address, view: view(array, entry)? })?,
        }
    }
    Ok(arrays)
}

fn view(array: CallArray, entry: &COperand) -> Result<View, AttentionError> {
    let argument = array.name();
    let dtype = abi::element_type(argument, entry.dtype)?;
    let dimensions = usize::try_from(entry.dimensions).ok().filter(|&dimensions| dimensions <= 4);
    let dimensions =
        dimensions.ok_or_else(|| invalid(argument, "number of dimensions", entry.dimensions, "at most 4"))?;
    let mut shape = [0; 4];
    for (extent, &given) in shape.iter_mut().zip(&entry.shape[..dimensions]) {
        let expected = "0 or more in each dimension";
        *extent = usize::try_from(given).map_err(|_| invalid(argument, "shape", given, expected))?;
    }
    View::new(dtype, &shape[..dimensions], &entry.strides[..dimensions])
}

/// The options of a call.
///
/// # Safety
/// The texts end with a NUL, and the arrays of parameters have as many elements as stated.
pub unsafe fn options(call: &CCall, arrays: &CallArrays) -> Result<CallOptions, AttentionError> {
    if call.flags & !abi::FLAGS != 0 {
        let unknown = format!("{:#x}", call.flags);
        return Err(invalid("call", "flags", unknown, "a sum of the flags of flashcore.h"));
    }
    if call.reserved != 0 {
        return Err(invalid("call", "field 'reserved'", call.reserved, "0"));
    }
    let is_set = |flag| call.flags & flag != 0;
    let corner = if is_set(abi::TOP_LEFT) { Corner::TopLeft } else { Corner::BottomRight };
    let limit = |flag, argument, keys: i64| match is_set(flag) {
        true => u32::try_from(keys).map(Some).map_err(|_| {
            invalid("call", argument, keys, "0 or more; without the flag, every key is seen on that side")
        }),
        false if keys != 0 => {
            Err(invalid("call", argument, keys, "0 without the flag that limits that side"))
        }
        false => Ok(None),
    };
    let before = limit(abi::LIMIT_BEFORE, "field 'keys_before'", call.keys_before)?;
    let after = limit(abi::LIMIT_AFTER, "field 'keys_after'", call.keys_after)?;
    let longest = |argument, rows: i64| {
        let rows = usize::try_from(rows).map_err(|_| invalid("call", argument, rows, "0 or more"))?;
        Ok::<_, AttentionError>((rows != 0).then_some(rows))
    };
    // SAFETY: this function's own contract.
    let (score, mask, floats, ints) = unsafe {
        (
            program("score", call.score)?,
            program("mask", call.mask)?,
            array("floats", call.floats, call.float_count, 1 << 16)?,
            array("ints", call.ints, call.int_count, 1 << 16)?,
        )
    };
    Ok(CallOptions {
        pass: pass(backward(call)?, is_set(abi::DETERMINISTIC), |operand| arrays.has(operand)),
        band: Band { before, after, ..Band::FULL }.aligned(corner),
        scale: (call.scale != 0.0).then_some(call.scale),
        softcap: (call.softcap != 0.0).then_some(call.softcap),
        dropout: None,
        tf32: is_set(abi::TF32),
        score,
        mask,
        floats: floats.to_vec(),
        ints: ints.to_vec(),
        longest: [
            longest("field 'longest_q'", call.longest_q)?,
            longest("field 'longest_k'", call.longest_k)?,
        ],
        scale_rows: call.scale_rows,
    })
}

fn backward(call: &CCall) -> Result<bool, AttentionError> {
    match call.pass {
        abi::FORWARD | abi::WRITE_SLOTS => Ok(false),
        abi::BACKWARD => Ok(true),
        other => {
            let expected = "FLASHCORE_FORWARD, FLASHCORE_BACKWARD or FLASHCORE_WRITE_SLOTS";
            Err(invalid("call", "field 'pass'", other, expected))
        }
    }
}

/// Where a call runs.
pub fn place(call: &CCall) -> Result<CallTarget, AttentionError> {
    match call.device_type {
        abi::CPU => Ok(CallTarget::Host(usize::try_from(call.threads).unwrap_or(usize::MAX))),
        abi::CUDA => Ok(CallTarget::Stream { ordinal: call.device, handle: call.stream }),
        other => {
            let expected = "FLASHCORE_CPU (1) or FLASHCORE_CUDA (2)";
            Err(invalid("call", "field 'device_type'", other, expected))
        }
    }
}

/// # Safety
/// `text` is null, or ends with a NUL.
unsafe fn program(what: &'static str, text: *const c_char) -> Result<Option<Program>, AttentionError> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: this function's own contract.
    let text = unsafe { CStr::from_ptr(text) }
        .to_str()
        .map_err(|error| invalid(what, "text", error.to_string(), "UTF-8"))?;
    let program = text.parse().map_err(|error| AttentionError::Program { what, error })?;
    Ok(Some(program))
}
