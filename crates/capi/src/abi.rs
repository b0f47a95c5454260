//! The layout and the numbers of `flashcore.h`. A test compares both with the header.

use std::ffi::c_char;

use flashcore::gpu::{LengthArray, Operand};
use flashcore::{ElementType, Tensor};

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

pub const OK: i32 = 0;
pub const INVALID: i32 = 1;
pub const UNSUPPORTED: i32 = 2;
pub const DEVICE: i32 = 3;
pub const INTERNAL: i32 = 4;

pub const FORWARD: u32 = 0;
pub const BACKWARD: u32 = 1;

pub const CPU: i32 = 1;
pub const CUDA: i32 = 2;

pub const LIMIT_BEFORE: u32 = 1;
pub const LIMIT_AFTER: u32 = 2;
pub const TOP_LEFT: u32 = 4;
pub const TF32: u32 = 8;
pub const DETERMINISTIC: u32 = 16;
pub const FLAGS: u32 = LIMIT_BEFORE | LIMIT_AFTER | TOP_LEFT | TF32 | DETERMINISTIC;

/// The element types with their numbers.
pub const TYPES: [(u32, ElementType); 7] = [
    (0x12002, ElementType::F32),
    (0x11002, ElementType::F16),
    (0x11004, ElementType::Bf16),
    (0x1080a, ElementType::E4m3),
    (0x1080c, ElementType::E5m2),
    (0x12000, ElementType::I32),
    (0x10801, ElementType::U8),
];

/// The numbers of the first tables and of the first gradients of tables.
const TABLES: u32 = 32;
const GRADIENTS: u32 = 40;
/// The number after the last.
const END: u32 = 48;

/// The operands other than tables, by their numbers.
pub const OPERANDS: [Operand; 21] = [
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
        ("LIMIT_BEFORE", LIMIT_BEFORE.into()),
        ("LIMIT_AFTER", LIMIT_AFTER.into()),
        ("TOP_LEFT", TOP_LEFT.into()),
        ("TF32", TF32.into()),
        ("DETERMINISTIC", DETERMINISTIC.into()),
        ("TABLE(0)", TABLES.into()),
        ("D_TABLE(0)", GRADIENTS.into()),
    ];
    let others = others.map(|(name, number)| (name.to_owned(), number));
    let types = TYPES.iter().map(|(number, dtype)| (dtype.name().to_owned(), u64::from(*number)));
    let operands = (0..).zip(OPERANDS).map(|(number, operand)| (operand.name().to_owned(), number));
    let all = others.into_iter().chain(types).chain(operands);
    all.map(|(name, number)| (format!("FLASHCORE_{}", name.to_uppercase()), number)).collect()
}

/// The operand with a number.
pub fn operand(number: u32) -> Option<Operand> {
    match number {
        TABLES..GRADIENTS => Some(Operand::Table((number - TABLES) as u8)),
        GRADIENTS..END => Some(Operand::DTable((number - GRADIENTS) as u8)),
        _ => OPERANDS.get(number as usize).copied(),
    }
}
