//! The data model of operands: registers, immediates, addresses and special registers.

use std::sync::Arc;

/// A name of a variable, parameter or function.
pub type Name = Arc<str>;

/// A virtual register: an index into [`Body::registers`](crate::Body::registers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reg(pub u32);

/// A branch target: an index into [`Body::labels`](crate::Body::labels).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Label(pub u32);

/// `@p` or `@!p` before an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Guard {
    /// The predicate register.
    pub reg: Reg,
    /// Whether the instruction executes when the predicate is false.
    pub negated: bool,
}

/// An immediate. Floating-point immediates are stored as bits, so that printing is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Imm {
    /// An integer. The instruction uses as many of its low bits as the operand is wide.
    Int(i64),
    /// Bits in hexadecimal: `0f3F800000` is 1.
    F32(u32),
    /// `0dXXXXXXXXXXXXXXXX`, and every decimal floating-point literal.
    F64(u64),
}

/// The base of an address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Base {
    /// A register.
    Reg(Reg),
    /// A variable or parameter.
    Symbol(Name),
    /// No base: the offset is the address.
    Absolute,
}

/// `[base + offset]`, offset in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// The base.
    pub base: Base,
    /// Bytes added to the base.
    pub offset: i64,
}

/// An operand as written. [`Op::signature`](crate::Op::signature) states what each position of an instruction
/// accepts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// A register.
    Reg(Reg),
    /// `!p`: a negated predicate source.
    Not(Reg),
    /// `_`: a result that is discarded.
    Sink,
    /// A constant.
    Imm(Imm),
    /// A special register such as `%tid.x`.
    Special(SpecialReg),
    /// `{a, b, …}`: registers, immediates or sinks.
    Vector(Vec<Operand>),
    /// `d|p`: a result and a predicate result; either may be a sink (`None`).
    Pair(Option<Reg>, Option<Reg>),
    /// `[base + offset]`.
    Address(Address),
    /// The address of a variable, plus bytes: `mov.u64 %rd1, smem+16;`.
    Symbol(Name, i64),
    /// A branch target.
    Label(Label),
    /// The label list of `brx.idx`, or the name of a `.branchtargets` list with its labels resolved.
    Labels(Vec<Label>),
    /// The callee of a direct call.
    Function(Name),
    /// A parenthesised list of `.param` variables (or registers and immediates) of a call.
    List(Vec<Operand>),
}

impl From<Reg> for Operand {
    fn from(reg: Reg) -> Operand {
        Operand::Reg(reg)
    }
}

macro_rules! special_registers {
    ($($variant:ident = $name:literal : $ty:ident),* $(,)?) => {
        /// A predefined, read-only register (PTX ISA, "Special Registers").
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs, reason = "the variants are the ISA's own register names")]
        pub enum SpecialReg { $($variant),* }

        impl SpecialReg {
            /// Every special register.
            pub const ALL: &'static [SpecialReg] = &[$(SpecialReg::$variant),*];

            /// The name in PTX text.
            pub const fn name(self) -> &'static str {
                match self { $(SpecialReg::$variant => $name),* }
            }

            /// The type of its value.
            pub const fn ty(self) -> crate::Type {
                match self { $(SpecialReg::$variant => crate::Type::$ty),* }
            }

            /// The special register with this name.
            pub fn from_name(name: &str) -> Option<SpecialReg> {
                SpecialReg::ALL.iter().copied().find(|r| r.name() == name)
            }
        }
    };
}

special_registers! {
    TidX = "%tid.x": U32, TidY = "%tid.y": U32, TidZ = "%tid.z": U32,
    NtidX = "%ntid.x": U32, NtidY = "%ntid.y": U32, NtidZ = "%ntid.z": U32,
    CtaidX = "%ctaid.x": U32, CtaidY = "%ctaid.y": U32, CtaidZ = "%ctaid.z": U32,
    NctaidX = "%nctaid.x": U32, NctaidY = "%nctaid.y": U32, NctaidZ = "%nctaid.z": U32,
    LaneId = "%laneid": U32, WarpId = "%warpid": U32, NwarpId = "%nwarpid": U32,
    SmId = "%smid": U32, NsmId = "%nsmid": U32, GridId = "%gridid": U64,
    LanemaskEq = "%lanemask_eq": U32, LanemaskLe = "%lanemask_le": U32, LanemaskLt = "%lanemask_lt": U32,
    LanemaskGe = "%lanemask_ge": U32, LanemaskGt = "%lanemask_gt": U32,
    Clock = "%clock": U32, ClockHi = "%clock_hi": U32, Clock64 = "%clock64": U64,
    GlobalTimer = "%globaltimer": U64, GlobalTimerLo = "%globaltimer_lo": U32,
    GlobalTimerHi = "%globaltimer_hi": U32,
    DynamicSmemSize = "%dynamic_smem_size": U32, TotalSmemSize = "%total_smem_size": U32,
    AggrSmemSize = "%aggr_smem_size": U32,
    ClusteridX = "%clusterid.x": U32, ClusteridY = "%clusterid.y": U32, ClusteridZ = "%clusterid.z": U32,
    NclusteridX = "%nclusterid.x": U32, NclusteridY = "%nclusterid.y": U32,
    NclusteridZ = "%nclusterid.z": U32,
    ClusterCtaidX = "%cluster_ctaid.x": U32, ClusterCtaidY = "%cluster_ctaid.y": U32,
    ClusterCtaidZ = "%cluster_ctaid.z": U32,
    ClusterNctaidX = "%cluster_nctaid.x": U32, ClusterNctaidY = "%cluster_nctaid.y": U32,
    ClusterNctaidZ = "%cluster_nctaid.z": U32,
    ClusterCtarank = "%cluster_ctarank": U32, ClusterNctarank = "%cluster_nctarank": U32,
    IsExplicitCluster = "%is_explicit_cluster": Pred,
    Envreg1 = "%envreg1": U32, Envreg2 = "%envreg2": U32,
}
