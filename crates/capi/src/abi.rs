//! The layout and the numbers of `flashcore.h`. A test compares both with the header.

use std::ffi::c_char;

use flashcore::gpu::{LengthArray, Operand};
use flashcore::{AttentionError, ElementType, Tensor};

use crate::errors::invalid;

/// `flashcore_operand`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct COperand {
    pub operand: u32,
    pub dtype: u32,
    pub address: u64,
    pub dimensions: u64,
    pub shape: [i64; 4],
    pub strides: [i64; 4],
}

/// `flashcore_call`. Every bit pattern is valid.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CCall {
    pub size: u64,
    pub error: *mut c_char,
    pub error_size: u64,
    pub operands: *const COperand,
    pub operand_count: u64,
    pub pass: u32,
    pub flags: u32,
    pub device_type: i32,
    pub device: i32,
    pub stream: u64,
    pub threads: u64,
    pub keys_before: i64,
    pub keys_after: i64,
    pub scale: f32,
    pub softcap: f32,
    pub score: *const c_char,
    pub mask: *const c_char,
    pub floats: *const f32,
    pub float_count: u64,
    pub ints: *const i32,
    pub int_count: u64,
    pub longest_q: i64,
    pub longest_k: i64,
    pub scale_rows: [u32; 3],
    pub reserved: u32,
}

impl COperand {
    /// All fields but the address.
    #[inline]
    pub fn words(&self) -> [u64; 10] {
        let [a, b, c, d] = self.shape.map(|extent| extent as u64);
        let [e, f, g, h] = self.strides.map(|stride| stride as u64);
        [u64::from(self.operand) << 32 | u64::from(self.dtype), self.dimensions, a, b, c, d, e, f, g, h]
    }
}

impl CCall {
    /// The fields of a call without programs that decide what is launched. The stream is not one of them.
    #[inline]
    pub fn words(&self) -> [u64; 11] {
        let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let [rows_q, rows_k, rows_v] = self.scale_rows;
        [
            self.operand_count,
            pair(self.pass, self.flags),
            pair(self.device_type as u32, self.device as u32),
            self.threads,
            self.keys_before as u64,
            self.keys_after as u64,
            pair(self.scale.to_bits(), self.softcap.to_bits()),
            self.longest_q as u64,
            self.longest_k as u64,
            pair(rows_q, rows_k),
            pair(rows_v, self.reserved),
        ]
    }
}

pub const OK: i32 = 0;
pub const INVALID: i32 = 1;
pub const UNSUPPORTED: i32 = 2;
pub const DEVICE: i32 = 3;
pub const INTERNAL: i32 = 4;

pub const FORWARD: u32 = 0;
pub const BACKWARD: u32 = 1;
pub const WRITE_SLOTS: u32 = 2;

pub const CPU: i32 = 1;
pub const CUDA: i32 = 2;

pub const LIMIT_BEFORE: u32 = 1;
pub const LIMIT_AFTER: u32 = 2;
pub const TOP_LEFT: u32 = 4;
pub const TF32: u32 = 8;
pub const DETERMINISTIC: u32 = 16;
pub const INTERLEAVED: u32 = 32;
pub const FLAGS: u32 = LIMIT_BEFORE | LIMIT_AFTER | TOP_LEFT | TF32 | DETERMINISTIC | INTERLEAVED;

pub const F32: u32 = 0x12002;
pub const F16: u32 = 0x11002;
pub const BF16: u32 = 0x11004;
pub const E4M3: u32 = 0x1080a;
pub const E5M2: u32 = 0x1080c;
pub const I32: u32 = 0x12000;
pub const I64: u32 = 0x14000;
pub const U8: u32 = 0x10801;

/// The element types with their numbers.
const TYPES: [(u32, ElementType); 7] = [
    (F32, ElementType::F32),
    (F16, ElementType::F16),
    (BF16, ElementType::Bf16),
    (E4M3, ElementType::E4m3),
    (E5M2, ElementType::E5m2),
    (I32, ElementType::I32),
    (U8, ElementType::U8),
];

/// The numbers of the first tables and of the first gradients of tables.
const TABLES: u32 = 32;
const GRADIENTS: u32 = 40;
/// The number after the last.
pub const END: u32 = 48;

/// The operands other than tables, by their numbers. The arrays of an append and the slots follow.
const OPERANDS: [Operand; 21] = [
    Operand::Q,
    Operand::K,
    Operand::V,
    Operand::OUT,
    Operand::Lse,
    Operand::Lengths(LengthArray::CumulativeQ),
    Operand::Lengths(LengthArray::CumulativeKv),
    Operand::Lengths(LengthArray::UsedQ),
    Operand::Lengths(LengthArray::UsedKv),
    Operand::Lengths(LengthArray::LeftPad),
    Operand::PageTable,
    Operand::Sinks,
    Operand::Descale(Tensor::Q),
    Operand::Descale(Tensor::K),
    Operand::Descale(Tensor::V),
    Operand::Tensor(Tensor::DOut),
    Operand::Tensor(Tensor::Dq),
    Operand::Tensor(Tensor::Dk),
    Operand::Tensor(Tensor::Dv),
    Operand::DLse,
    Operand::DSinks,
];

/// The arrays of an append, in the order of their numbers.
pub const APPENDED: [&str; 6] =
    ["k_new", "v_new", "cu_seqlens_k_new", "rotary_cos", "rotary_sin", "rotary_seqlens"];

/// An array that a call names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallArray {
    /// An operand of the pass.
    Pass(Operand),
    /// An array of the append before the pass: its index in [`APPENDED`].
    Append(usize),
    /// The slots of new keys and values.
    Slots,
}

impl CallArray {
    pub fn name(self) -> &'static str {
        match self {
            CallArray::Pass(operand) => operand.name(),
            CallArray::Append(index) => APPENDED[index],
            CallArray::Slots => "slot_mapping",
        }
    }

    /// The operand of the pass.
    pub fn operand(self) -> Option<Operand> {
        match self {
            CallArray::Pass(operand) => Some(operand),
            _ => None,
        }
    }

    /// Whether the array has the dimensions batch, head, row, dim.
    pub fn has_rows(self) -> bool {
        matches!(self, CallArray::Pass(Operand::Tensor(_)) | CallArray::Append(0 | 1))
    }
}

/// The numbers of the header, by their names there.
pub fn numbers() -> Vec<(String, u64)> {
    let others = [
        ("OK", OK as u64),
        ("INVALID", INVALID as u64),
        ("UNSUPPORTED", UNSUPPORTED as u64),
        ("DEVICE", DEVICE as u64),
        ("INTERNAL", INTERNAL as u64),
        ("CPU", CPU as u64),
        ("CUDA", CUDA as u64),
        ("FORWARD", FORWARD.into()),
        ("BACKWARD", BACKWARD.into()),
        ("WRITE_SLOTS", WRITE_SLOTS.into()),
        ("I64", I64.into()),
        ("LIMIT_BEFORE", LIMIT_BEFORE.into()),
        ("LIMIT_AFTER", LIMIT_AFTER.into()),
        ("TOP_LEFT", TOP_LEFT.into()),
        ("TF32", TF32.into()),
        ("DETERMINISTIC", DETERMINISTIC.into()),
        ("INTERLEAVED", INTERLEAVED.into()),
        ("TABLE(0)", TABLES.into()),
        ("D_TABLE(0)", GRADIENTS.into()),
    ];
    let others = others.map(|(name, number)| (name.to_owned(), number));
    let types = TYPES.iter().map(|(number, dtype)| (dtype.name().to_owned(), u64::from(*number)));
    let slots = CallArray::Slots.name();
    let arrays = OPERANDS.iter().map(|operand| operand.name()).chain(APPENDED).chain([slots]);
    let arrays = (0..).zip(arrays).map(|(number, name)| (name.to_owned(), number));
    let all = others.into_iter().chain(types).chain(arrays);
    all.map(|(name, number)| (format!("FLASHCORE_{}", name.to_uppercase()), number)).collect()
}

/// The array with a number.
pub fn array(number: u32) -> Option<CallArray> {
    let index = number as usize;
    match number {
        TABLES..GRADIENTS => Some(CallArray::Pass(Operand::Table((number - TABLES) as u8))),
        GRADIENTS..END => Some(CallArray::Pass(Operand::DTable((number - GRADIENTS) as u8))),
        _ => match index.checked_sub(OPERANDS.len()) {
            None => Some(CallArray::Pass(OPERANDS[index])),
            Some(append) if append < APPENDED.len() => Some(CallArray::Append(append)),
            Some(after) => (after == APPENDED.len()).then_some(CallArray::Slots),
        },
    }
}

/// The element type with a number, of an array.
pub fn element_type(argument: &'static str, number: u32) -> Result<ElementType, AttentionError> {
    let dtype = TYPES.iter().find(|(of, _)| *of == number).map(|(_, dtype)| *dtype);
    dtype.ok_or_else(|| {
        let expected = TYPES.map(|(number, dtype)| format!("{number:#x} ({dtype})")).join(", ");
        invalid(argument, "dtype", format!("{number:#x}"), expected)
    })
}
