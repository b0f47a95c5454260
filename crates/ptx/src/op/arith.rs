use crate::Type;

/// Rounding of floating-point arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum Rounding {
    /// `.rn`: nearest even.
    Rn,
    /// `.rz`: toward zero.
    Rz,
    /// `.rm`: toward −∞.
    Rm,
    /// `.rp`: toward +∞.
    Rp,
}

/// Precision or rounding of an operation that has approximate forms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Nothing written: `add.f32` (round to nearest even, may be contracted), and all integer operations.
    #[default]
    Unspecified,
    /// `.rn`, `.rz`, `.rm`, `.rp`.
    Rounded(Rounding),
    /// `.approx`.
    Approx,
    /// `.full` (div only).
    Full,
}

/// Modifiers of arithmetic; which of them an operation accepts is the verifier's business.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FloatMods {
    /// Rounding or approximation.
    pub precision: Precision,
    /// `.ftz`: subnormal inputs and results become zero of the same sign.
    pub ftz: bool,
    /// `.sat`: results clamped to [0, 1]; for integer add/sub/mad to the type's range.
    pub sat: bool,
    /// `.relu`: negative results and NaN become 0 (f16 and bf16; min, max, fma).
    pub relu: bool,
    /// `.NaN` of min and max: a NaN input gives NaN.
    pub nan: bool,
    /// `.xorsign.abs` of min and max.
    pub xorsign_abs: bool,
}

impl FloatMods {
    /// No modifiers.
    pub const NONE: FloatMods = FloatMods {
        precision: Precision::Unspecified,
        ftz: false,
        sat: false,
        relu: false,
        nan: false,
        xorsign_abs: false,
    };
    /// `.rn`.
    pub const RN: FloatMods = FloatMods { precision: Precision::Rounded(Rounding::Rn), ..FloatMods::NONE };
    /// `.approx.ftz`.
    pub const APPROX_FTZ: FloatMods =
        FloatMods { precision: Precision::Approx, ftz: true, ..FloatMods::NONE };
}

/// One source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum UnaryOp {
    Abs,
    Neg,
    Not,
    Cnot,
    Popc,
    Clz,
    Brev,
    /// `bfind`: position of the most significant non-sign bit.
    Bfind,
    /// `bfind.shiftamt`.
    BfindShiftamt,
    Rcp,
    Sqrt,
    Rsqrt,
    Sin,
    Cos,
    Lg2,
    Ex2,
    Tanh,
}

/// Two sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum BinaryOp {
    Add,
    Sub,
    /// Floating-point `mul`.
    Mul,
    /// `mul.lo`.
    MulLo,
    /// `mul.hi`.
    MulHi,
    /// `mul.wide`: the type named is the sources', the result is twice as wide.
    MulWide,
    /// `mul24.lo`.
    Mul24Lo,
    /// `mul24.hi`.
    Mul24Hi,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
    /// `shl.bN`; the amount is a u32.
    Shl,
    /// `shr.{b,u,s}N`; the amount is a u32.
    Shr,
    Copysign,
}

/// Three sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum TernaryOp {
    /// Floating-point `fma`.
    Fma,
    /// Floating-point `mad` (same as fma on sm_20 and later).
    Mad,
    /// `mad.lo`.
    MadLo,
    /// `mad.hi`.
    MadHi,
    /// `mad.wide`: `a` and `b` of the type named, `c` and the result twice as wide.
    MadWide,
    /// `mad24.lo`.
    Mad24Lo,
    /// `mad24.hi`.
    Mad24Hi,
    /// `sad`: |a − b| + c.
    Sad,
}

/// Arithmetic with the carry flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum CarryOp {
    /// `add.cc`
    AddCc,
    /// `addc`
    Addc,
    /// `addc.cc`
    AddcCc,
    /// `sub.cc`
    SubCc,
    /// `subc`
    Subc,
    /// `subc.cc`
    SubcCc,
    /// `mad.lo.cc`
    MadLoCc,
    /// `mad.hi.cc`
    MadHiCc,
    /// `madc.lo`
    MadcLo,
    /// `madc.hi`
    MadcHi,
    /// `madc.lo.cc`
    MadcLoCc,
    /// `madc.hi.cc`
    MadcHiCc,
}

/// Comparison. The `U` forms are true when either operand is NaN; `Lo` to `Hs` are unsigned integer forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum CmpOp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Lo,
    Ls,
    Hi,
    Hs,
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

/// Combination of a comparison with a predicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum BoolOp {
    And,
    Or,
    Xor,
}

/// `testp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum TestpOp {
    Finite,
    Infinite,
    Number,
    NotANumber,
    Normal,
    Subnormal,
}

/// Direction of a funnel shift.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum ShiftDirection {
    Left,
    Right,
}

/// What happens to shift amounts beyond the width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum ShfMode {
    Clamp,
    Wrap,
}

/// `prmt` modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum PrmtMode {
    Generic,
    /// `.f4e`
    F4e,
    /// `.b4e`
    B4e,
    /// `.rc8`
    Rc8,
    /// `.ecl`
    Ecl,
    /// `.ecr`
    Ecr,
    /// `.rc16`
    Rc16,
}

/// Which bytes of `b` a `dp2a` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum DotHalf {
    Lo,
    Hi,
}

/// Rounding of `cvt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CvtRounding {
    /// `.rn`, `.rz`, `.rm`, `.rp`.
    Float(Rounding),
    /// `.rni`, `.rzi`, `.rmi`, `.rpi`: to an integral value.
    Integer(Rounding),
    /// `.rna`: nearest, ties away from zero (tf32).
    Rna,
}

/// Saturation of `cvt`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CvtSaturation {
    /// None written.
    #[default]
    None,
    /// `.sat`.
    Sat,
    /// `.satfinite`.
    SatFinite,
}

/// `cvt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cvt {
    /// Type of the result.
    pub to: Type,
    /// Type of the source.
    pub from: Type,
    /// Rounding, where one is written.
    pub rounding: Option<CvtRounding>,
    /// `.ftz`.
    pub ftz: bool,
    /// Saturation.
    pub saturation: CvtSaturation,
    /// `.relu`.
    pub relu: bool,
}

impl Cvt {
    /// Whether it takes two sources and packs them (`cvt.rn.f16x2.f32 d, a, b`): the result is a pair and the
    /// source is f32.
    pub fn packed(&self) -> bool {
        self.from == Type::F32 && matches!(self.to, Type::F16x2 | Type::Bf16x2 | Type::E4m3x2 | Type::E5m2x2)
    }
}
