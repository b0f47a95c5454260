//! PTX as data: a typed model of NVIDIA's parallel thread execution ISA, with a builder, a printer, a parser, a
//! verifier and the launch contract. It knows no attention, no GPU and no emulator.
//!
//! A [`Module`] holds variables and functions; a function's body is a list of statements; an instruction is a typed
//! [`Op`] with positional [`Operand`]s. The order of operands is the PTX ISA's and stands in the documentation of
//! each `Op` variant; [`Op::signature`] states it as data, so printer, parser, verifier and emulator agree on one
//! description of each instruction.

mod builder;
mod kernel;
mod labels;
mod machine;
mod module;
mod op;
mod operand;
mod parse;
mod print;
mod signature;
mod tensor_map;
mod types;
mod verify;

pub use builder::{
    Builder, BulkOptions, ClusterShared, F32, F64, Float, Global, Half, Int, Local, Major, Number, Pointer,
    Pred, R16, R32, R64, Shared, SharedPointer, Src, TensorMapPtr, Value, Word,
};
pub use kernel::{Access, Arg, BufferSpec, Dim3, Kernel, Launch};
pub use machine::Machine;
pub use module::{
    Body, Function, FunctionKind, Initializer, Instruction, Item, LaunchBounds, Linkage, Module, Param,
    ParamSpace, Register, Statement, Target, TargetSuffix, UnknownTarget, Variable, Version,
};
pub use op::*;
pub use operand::{Address, Base, Guard, Imm, Label, Name, Operand, Reg, SpecialReg};
pub use parse::{ParseError, parse};
pub use signature::{Flow, Signature, Slot, SlotKind};
pub use tensor_map::{Element, L2Promotion, Swizzle, TensorMapError, TensorMapSpec};
pub use types::{Space, Type};
pub use verify::{Requirement, Rule, Verified, Violation, Violations};
