//! PTX as data: a typed model of NVIDIA's parallel thread execution ISA, with a builder, a printer, a parser,
//! a verifier and the launch contract. The crate contains nothing about attention, GPUs or the emulator.
//!
//! A [`Module`] has variables and functions. A function's body is a list of statements. An instruction is an
//! [`Op`] with [`Operand`]s in the order of the PTX ISA. Each instruction is described once, by a row of a
//! table in the file of its group (`src/isa/`): variant, documentation, mnemonic, operands, accepted
//! modifiers and requirement. The printer, the parser and the verifier read the rows. Other crates read them
//! through [`Op::signature`] and [`Op::requirement`].
//!
//! "PTX ISA" in the documentation is NVIDIA's *Parallel Thread Execution ISA*. A quoted name after it is a
//! section of that document.
#![warn(missing_docs)]

mod builder;
mod isa;
mod kernel;
mod labels;
mod machine;
mod module;
mod operand;
mod parse;
mod print;
pub mod quote;
mod reach;
mod tensor_map;
mod types;
mod verify;

pub use builder::{
    Builder, BulkOptions, ClusterShared, F32, F64, Float, Global, Half, Int, Local, Major, Number, Pointer,
    Pred, R16, R32, R64, Shared, SharedPointer, Src, TensorMapPtr, Value, Word,
};
pub use isa::requirement::Requirement;
pub use isa::signature::{Flow, Signature, Slot, SlotKind};
pub use isa::*;
pub use kernel::{Access, Arg, BufferSpec, Dim3, Kernel, Launch, StructArg};
pub use machine::Machine;
pub use module::{
    Body, Function, FunctionKind, Initializer, Instruction, Item, LaunchBounds, Linkage, Module, Param,
    ParamSpace, Register, Statement, Target, TargetSuffix, UnknownTarget, Variable, Version,
};
pub use operand::{Address, Base, Guard, Imm, Label, Name, Operand, Reg, SpecialReg};
pub use parse::{LeftOut, LineTable, ParseError, SourceFrame, parse, parse_known};
pub use tensor_map::{Element, L2Promotion, Swizzle, TensorMapError, TensorMapSpec};
pub use types::{Space, Type};
pub use verify::{Rule, Verified, Violation, Violations};
