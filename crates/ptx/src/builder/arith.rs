//! Instructions for arithmetic, logic, comparison and conversion.

use super::{Builder, F32, F64, Float, Int, Pred, R16, R32, R64, Src, Value};
use crate::{
    BinaryOp, BoolOp, CmpOp, Cvt, CvtRounding, CvtSaturation, FloatMods, Guard, Op, Operand, Precision,
    PrmtMode, Rounding, ShfMode, ShiftDirection, TernaryOp, Type, UnaryOp,
};

/// A register type with `add`, `sub` and `mul`, and the PTX operations for them.
pub trait Number: Value {
    #[doc(hidden)]
    const ARITH: Type;
    #[doc(hidden)]
    const MUL: BinaryOp;
    #[doc(hidden)]
    const MULTIPLY_ADD: TernaryOp;
    /// Float instructions name their rounding. ptxas may fuse a product and a sum without a rounding, and the
    /// fused result can differ by a bit from the emulator's result.
    #[doc(hidden)]
    const MODS: FloatMods;
}

macro_rules! numbers {
    ($($value:ident: $ty:ident, $mul:ident, $fma:ident, $mods:ident);* $(;)?) => {$(
        impl Number for $value {
            const ARITH: Type = Type::$ty;
            const MUL: BinaryOp = BinaryOp::$mul;
            const MULTIPLY_ADD: TernaryOp = TernaryOp::$fma;
            const MODS: FloatMods = FloatMods::$mods;
        }
    )*};
}

numbers! {
    R16: S16, MulLo, MadLo, NONE;
    R32: S32, MulLo, MadLo, NONE;
    R64: S64, MulLo, MadLo, NONE;
    F32: F32, Mul, Fma, RN;
    F64: F64, Mul, Fma, RN;
}

const OR_NAN: FloatMods = FloatMods { nan: true, ..FloatMods::NONE };

/// One table row per instruction: the method that returns a fresh register, and its `_to` twin. The first
/// source is a register, so that its type determines the type of the others.
macro_rules! instructions {
    ($($(#[$doc:meta])* $name:ident / $to:ident <$v:ident: $bound:ident> ($a:ident $(, $arg:ident)*) = $op:expr;)*) => {$(
        $(#[$doc])*
        pub fn $name<$v: $bound>(&mut self, $a: $v $(, $arg: impl Into<Src<$v>>)*) -> $v {
            let d = self.reg();
            self.$to::<$v>(d, $a $(, $arg)*);
            d
        }

        $(#[$doc])*
        /// The result is written to `d`.
        pub fn $to<$v: $bound>(&mut self, d: $v, $a: $v $(, $arg: impl Into<Src<$v>>)*) {
            self.compute(d, $op, [Operand::Reg($a.reg()) $(, $arg.into().into())*]);
        }
    )*};
}

/// Comparisons whose result is combined with a predicate.
macro_rules! setp_with {
    ($($(#[$doc:meta])* $name:ident<$value:ident>($ty:ident, $combine:ident);)*) => { $(
        $(#[$doc])*
        pub fn $name<V: $value>(
            &mut self,
            cmp: CmpOp,
            a: V,
            b: impl Into<Src<V>>,
            c: impl Into<Guard>,
        ) -> Pred {
            self.setp(cmp, V::$ty, a, b, Some((BoolOp::$combine, c.into())))
        }
    )* };
}

impl Builder {
    instructions! {
        /// `a + b`.
        add / add_to <V: Number>(a, b) = Op::Binary(BinaryOp::Add, V::ARITH, V::MODS);
        /// `a − b`.
        sub / sub_to <V: Number>(a, b) = Op::Binary(BinaryOp::Sub, V::ARITH, V::MODS);
        /// `a · b`; the low half for integers.
        mul / mul_to <V: Number>(a, b) = Op::Binary(V::MUL, V::ARITH, V::MODS);
        /// `a · b + c`; fused for floats, the low half of the product for integers.
        mad / mad_to <V: Number>(a, b, c) = Op::Ternary(V::MULTIPLY_ADD, V::ARITH, V::MODS);
        /// The high half of `a · b`, unsigned.
        mul_hi_u / mul_hi_u_to <V: Int>(a, b) = Op::Binary(BinaryOp::MulHi, V::UNSIGNED, FloatMods::NONE);
        /// `a / b`, unsigned.
        div_u / div_u_to <V: Int>(a, b) = Op::Binary(BinaryOp::Div, V::UNSIGNED, FloatMods::NONE);
        /// `a mod b`, unsigned.
        rem_u / rem_u_to <V: Int>(a, b) = Op::Binary(BinaryOp::Rem, V::UNSIGNED, FloatMods::NONE);
        /// `a / b`, signed, toward zero.
        div_s / div_s_to <V: Int>(a, b) = Op::Binary(BinaryOp::Div, V::SIGNED, FloatMods::NONE);
        /// The minimum, unsigned.
        min_u / min_u_to <V: Int>(a, b) = Op::Binary(BinaryOp::Min, V::UNSIGNED, FloatMods::NONE);
        /// The maximum, unsigned.
        max_u / max_u_to <V: Int>(a, b) = Op::Binary(BinaryOp::Max, V::UNSIGNED, FloatMods::NONE);
        /// The minimum, signed.
        min_s / min_s_to <V: Int>(a, b) = Op::Binary(BinaryOp::Min, V::SIGNED, FloatMods::NONE);
        /// The maximum, signed.
        max_s / max_s_to <V: Int>(a, b) = Op::Binary(BinaryOp::Max, V::SIGNED, FloatMods::NONE);
        /// Bitwise and.
        and / and_to <V: Int>(a, b) = Op::Binary(BinaryOp::And, V::TYPE, FloatMods::NONE);
        /// Bitwise or.
        or / or_to <V: Int>(a, b) = Op::Binary(BinaryOp::Or, V::TYPE, FloatMods::NONE);
        /// Bitwise exclusive or.
        xor / xor_to <V: Int>(a, b) = Op::Binary(BinaryOp::Xor, V::TYPE, FloatMods::NONE);
        /// Bitwise not.
        not / not_to <V: Int>(a) = Op::Unary(UnaryOp::Not, V::TYPE, FloatMods::NONE);
        /// The minimum; if one operand is NaN, the other operand.
        min / min_to <V: Float>(a, b) = Op::Binary(BinaryOp::Min, V::TYPE, FloatMods::NONE);
        /// `a + b`, rounded towards +∞.
        add_up / add_up_to <V: Float>(a, b) = Op::Binary(BinaryOp::Add, V::TYPE, FloatMods::RP);
        /// The maximum; if one operand is NaN, the other operand.
        max / max_to <V: Float>(a, b) = Op::Binary(BinaryOp::Max, V::TYPE, FloatMods::NONE);
        /// −a.
        neg / neg_to <V: Float>(a) = Op::Unary(UnaryOp::Neg, V::TYPE, FloatMods::NONE);
        /// |a|.
        abs / abs_to <V: Float>(a) = Op::Unary(UnaryOp::Abs, V::TYPE, FloatMods::NONE);
        /// `a / b`, rounded to nearest even.
        div / div_to <V: Float>(a, b) = Op::Binary(BinaryOp::Div, V::TYPE, FloatMods::RN);
    }

    /// A fresh register with the value of `a`.
    pub fn mov<V: Value>(&mut self, a: impl Into<Src<V>>) -> V {
        let d = self.reg();
        self.mov_to(d, a);
        d
    }

    /// Moves `a` to `d`.
    pub fn mov_to<V: Value>(&mut self, d: V, a: impl Into<Src<V>>) {
        self.compute(d, Op::Mov(V::TYPE), [a.into().into()]);
    }

    // ---- shifts and bits
    // ---------------------------------------------------------------------------------------

    /// The number of bits that are set.
    pub fn popc(&mut self, a: R32) -> R32 {
        let d = self.reg();
        self.compute(d, Op::Unary(UnaryOp::Popc, Type::B32, FloatMods::NONE), [Operand::Reg(a.reg())]);
        d
    }

    /// `a << bits`.
    pub fn shl<V: Int>(&mut self, a: V, bits: impl Into<Src<R32>>) -> V {
        self.shift(BinaryOp::Shl, V::TYPE, a, bits)
    }

    /// `a >> bits`, filled with zeros.
    pub fn shr_u<V: Int>(&mut self, a: V, bits: impl Into<Src<R32>>) -> V {
        self.shift(BinaryOp::Shr, V::UNSIGNED, a, bits)
    }

    /// `a >> bits`, filled with the sign bit.
    pub fn shr_s<V: Int>(&mut self, a: V, bits: impl Into<Src<R32>>) -> V {
        self.shift(BinaryOp::Shr, V::SIGNED, a, bits)
    }

    fn shift<V: Int>(&mut self, op: BinaryOp, ty: Type, a: V, bits: impl Into<Src<R32>>) -> V {
        let d = self.reg();
        self.compute(d, Op::Binary(op, ty, FloatMods::NONE), [Operand::Reg(a.reg()), bits.into().into()]);
        d
    }

    /// `lop3` with the truth table `lut` (PTX ISA, "lop3"), computed from 0xF0 for `a`, 0xCC for `b` and 0xAA
    /// for `c`.
    pub fn lop3(
        &mut self,
        a: impl Into<Src<R32>>,
        b: impl Into<Src<R32>>,
        c: impl Into<Src<R32>>,
        lut: u8,
    ) -> R32 {
        let d = self.reg();
        let lut: Src<R32> = i32::from(lut).into();
        self.compute(d, Op::Lop3(None), [a.into().into(), b.into().into(), c.into().into(), lut.into()]);
        d
    }

    /// Four bytes of the pair (`a`, `b`), selected by the four nibbles of `selector`. 0–3 name the bytes of
    /// `a`, 4–7 those of `b`.
    pub fn prmt(
        &mut self,
        a: impl Into<Src<R32>>,
        b: impl Into<Src<R32>>,
        selector: impl Into<Src<R32>>,
    ) -> R32 {
        let d = self.reg();
        self.compute(
            d,
            Op::Prmt(PrmtMode::Generic),
            [a.into().into(), b.into().into(), selector.into().into()],
        );
        d
    }

    /// The low 32 bits of (`high`:`low`) >> `bits`, `bits` modulo 32.
    pub fn funnel_right(&mut self, low: R32, high: R32, bits: impl Into<Src<R32>>) -> R32 {
        let d = self.reg();
        let op = Op::Shf(ShiftDirection::Right, ShfMode::Wrap);
        self.compute(d, op, [Operand::Reg(low.reg()), Operand::Reg(high.reg()), bits.into().into()]);
        d
    }

    // ---- floating point
    // ----------------------------------------------------------------------------------------

    /// `2^a`, approximate. Subnormals are flushed to zero. −∞ gives exactly 0.
    pub fn ex2(&mut self, a: F32) -> F32 {
        self.approx(UnaryOp::Ex2, a)
    }

    /// Writes the maximum to `d`, or NaN if an operand is NaN.
    pub fn max_nan_to(&mut self, d: F32, a: F32, b: impl Into<Src<F32>>) {
        self.compute(
            d,
            Op::Binary(BinaryOp::Max, Type::F32, OR_NAN),
            [Operand::Reg(a.reg()), b.into().into()],
        );
    }

    /// Writes the minimum to `d`, or NaN if an operand is NaN.
    pub fn min_nan_to(&mut self, d: F32, a: F32, b: impl Into<Src<F32>>) {
        self.compute(
            d,
            Op::Binary(BinaryOp::Min, Type::F32, OR_NAN),
            [Operand::Reg(a.reg()), b.into().into()],
        );
    }

    /// Writes `2^a` to `d`, approximate, with subnormals flushed to zero.
    pub fn ex2_to(&mut self, d: F32, a: F32) {
        self.compute(d, Op::Unary(UnaryOp::Ex2, Type::F32, FloatMods::APPROX_FTZ), [Operand::Reg(a.reg())]);
    }

    /// Writes `tanh a` to `d`: approximate, with a relative error of up to 2⁻¹¹.
    pub fn tanh_to(&mut self, d: F32, a: F32) {
        self.compute(
            d,
            Op::Unary(
                UnaryOp::Tanh,
                Type::F32,
                FloatMods { precision: Precision::Approx, ..FloatMods::NONE },
            ),
            [Operand::Reg(a.reg())],
        );
    }

    /// `log2 a`, approximate, with subnormals flushed to zero.
    pub fn lg2(&mut self, a: F32) -> F32 {
        self.approx(UnaryOp::Lg2, a)
    }

    /// `1 / a`, approximate, with subnormals flushed to zero.
    pub fn rcp(&mut self, a: F32) -> F32 {
        self.approx(UnaryOp::Rcp, a)
    }

    /// `sqrt a`, approximate, with subnormals flushed to zero.
    pub fn sqrt_approx(&mut self, a: F32) -> F32 {
        self.approx(UnaryOp::Sqrt, a)
    }

    fn approx(&mut self, op: UnaryOp, a: F32) -> F32 {
        let d = self.reg();
        self.compute(d, Op::Unary(op, Type::F32, FloatMods::APPROX_FTZ), [Operand::Reg(a.reg())]);
        d
    }

    // ---- comparison
    // --------------------------------------------------------------------------------------------

    /// The comparison `a cmp b`, unsigned.
    pub fn setp_u<V: Int>(&mut self, cmp: CmpOp, a: V, b: impl Into<Src<V>>) -> Pred {
        self.setp(cmp, V::UNSIGNED, a, b, None)
    }

    /// The comparison `a cmp b`, signed.
    pub fn setp_s<V: Int>(&mut self, cmp: CmpOp, a: V, b: impl Into<Src<V>>) -> Pred {
        self.setp(cmp, V::SIGNED, a, b, None)
    }

    /// The comparison `a cmp b` of floats.
    pub fn setp_f<V: Float>(&mut self, cmp: CmpOp, a: V, b: impl Into<Src<V>>) -> Pred {
        self.setp(cmp, V::TYPE, a, b, None)
    }

    setp_with! {
        /// `(a cmp b) and c`, unsigned.
        setp_u_and<Int>(UNSIGNED, And);
        /// `(a cmp b) and c`, signed.
        setp_s_and<Int>(SIGNED, And);
        /// `(a cmp b) or c`, floats.
        setp_f_or<Float>(TYPE, Or);
    }

    fn setp<V: Value>(
        &mut self,
        cmp: CmpOp,
        ty: Type,
        a: V,
        b: impl Into<Src<V>>,
        with: Option<(BoolOp, Guard)>,
    ) -> Pred {
        let d = self.reg();
        let op = Op::Setp { cmp, combine: with.map(|w| w.0), ty, ftz: false };
        let sources = [Operand::Reg(a.reg()), b.into().into()];
        self.compute(d, op, sources.into_iter().chain(with.map(|w| w.1.into())));
        d
    }

    /// `a and b` of predicates.
    pub fn and_pred(&mut self, a: Pred, b: Pred) -> Pred {
        self.predicates(BinaryOp::And, a, b)
    }

    /// `a or b` of predicates.
    pub fn or_pred(&mut self, a: Pred, b: Pred) -> Pred {
        self.predicates(BinaryOp::Or, a, b)
    }

    /// `a xor b` of predicates.
    pub fn xor_pred(&mut self, a: Pred, b: Pred) -> Pred {
        self.predicates(BinaryOp::Xor, a, b)
    }

    fn predicates(&mut self, op: BinaryOp, a: Pred, b: Pred) -> Pred {
        let d = self.reg();
        let op = Op::Binary(op, Type::Pred, FloatMods::NONE);
        self.compute::<Pred>(d, op, [Operand::Reg(a.reg()), Operand::Reg(b.reg())]);
        d
    }

    /// The negation of a predicate.
    pub fn not_pred(&mut self, a: Pred) -> Pred {
        let d = self.reg();
        let op = Op::Unary(UnaryOp::Not, Type::Pred, FloatMods::NONE);
        self.compute::<Pred>(d, op, [Operand::Reg(a.reg())]);
        d
    }

    /// `a` if `pred` is true, else `b`.
    pub fn selp<V: Value>(&mut self, a: impl Into<Src<V>>, b: impl Into<Src<V>>, pred: Pred) -> V {
        let d = self.reg();
        self.selp_to(d, a, b, pred);
        d
    }

    /// Writes `a` to `d` if `pred` is true, else `b`.
    pub fn selp_to<V: Value>(&mut self, d: V, a: impl Into<Src<V>>, b: impl Into<Src<V>>, pred: Pred) {
        self.compute(d, Op::Selp(V::TYPE), [a.into().into(), b.into().into(), Operand::Reg(pred.reg())]);
    }

    // ---- conversion
    // --------------------------------------------------------------------------------------------

    /// `a` zero-extended to 64 bits.
    pub fn zext(&mut self, a: R32) -> R64 {
        self.cvt(Type::U64, Type::U32, None, a)
    }

    /// The low 32 bits of `a`.
    pub fn trunc(&mut self, a: R64) -> R32 {
        self.cvt(Type::U32, Type::U64, None, a)
    }

    /// An unsigned integer as f32, rounded to nearest even.
    pub fn u32_to_f32(&mut self, a: R32) -> F32 {
        self.cvt(Type::F32, Type::U32, Some(CvtRounding::Float(Rounding::Rn)), a)
    }

    /// A signed integer as f32, rounded to nearest even.
    pub fn s32_to_f32(&mut self, a: R32) -> F32 {
        self.cvt(Type::F32, Type::S32, Some(CvtRounding::Float(Rounding::Rn)), a)
    }

    /// An f32 as a signed integer with the given rounding. Values out of range are clamped; NaN gives 0.
    pub fn f32_to_s32(&mut self, rounding: Rounding, a: F32) -> R32 {
        self.cvt(Type::S32, Type::F32, Some(CvtRounding::Integer(rounding)), a)
    }

    pub(super) fn cvt<A: Value, D: Value>(
        &mut self,
        to: Type,
        from: Type,
        rounding: Option<CvtRounding>,
        a: A,
    ) -> D {
        let d = self.reg();
        let cvt = Cvt { to, from, rounding, ftz: false, saturation: CvtSaturation::None, relu: false };
        self.compute(d, Op::Cvt(cvt), [Operand::Reg(a.reg())]);
        d
    }

    /// The bits of an f32.
    pub fn to_bits(&mut self, a: F32) -> R32 {
        let d = self.reg();
        self.compute::<R32>(d, Op::Mov(Type::B32), [Operand::Reg(a.reg())]);
        d
    }

    /// The f32 of these bits.
    pub fn from_bits(&mut self, a: R32) -> F32 {
        let d = self.reg();
        self.compute::<F32>(d, Op::Mov(Type::B32), [Operand::Reg(a.reg())]);
        d
    }

    /// Packs two 16-bit registers into one, `low` in the lower half.
    pub fn join16(&mut self, low: R16, high: R16) -> R32 {
        let d = self.reg();
        let halves = Operand::Vector(vec![Operand::Reg(low.reg()), Operand::Reg(high.reg())]);
        self.compute::<R32>(d, Op::Mov(Type::B32), [halves]);
        d
    }

    /// The lower and the upper half of `a`.
    pub fn split16(&mut self, a: R32) -> [R16; 2] {
        let d: [R16; 2] = self.regs();
        let halves = Operand::Vector(d.iter().map(|r| Operand::Reg(r.reg())).collect());
        self.op(Op::Mov(Type::B32), [halves, Operand::Reg(a.reg())]);
        d
    }

    /// `a · b`, 32 × 32 → 64 bits, unsigned.
    pub fn mul_wide_u(&mut self, a: R32, b: impl Into<Src<R32>>) -> R64 {
        let d = self.reg();
        let op = Op::Binary(BinaryOp::MulWide, Type::U32, FloatMods::NONE);
        self.compute(d, op, [Operand::Reg(a.reg()), b.into().into()]);
        d
    }

    /// `a · b`, 32 × 32 → 64 bits, signed.
    pub fn mul_wide_s(&mut self, a: R32, b: impl Into<Src<R32>>) -> R64 {
        let d = self.reg();
        let op = Op::Binary(BinaryOp::MulWide, Type::S32, FloatMods::NONE);
        self.compute(d, op, [Operand::Reg(a.reg()), b.into().into()]);
        d
    }

    /// `a · b + c`, 32 × 32 + 64 → 64 bits, unsigned.
    pub fn mad_wide_u(&mut self, a: R32, b: impl Into<Src<R32>>, c: impl Into<Src<R64>>) -> R64 {
        let d = self.reg();
        let op = Op::Ternary(TernaryOp::MadWide, Type::U32, FloatMods::NONE);
        self.compute(d, op, [Operand::Reg(a.reg()), b.into().into(), c.into().into()]);
        d
    }

    /// `sqrt a`, rounded to nearest even.
    pub fn sqrt(&mut self, a: F32) -> F32 {
        let d = self.reg();
        let mods = FloatMods { precision: Precision::Rounded(Rounding::Rn), ..FloatMods::NONE };
        self.compute(d, Op::Unary(UnaryOp::Sqrt, Type::F32, mods), [Operand::Reg(a.reg())]);
        d
    }
}
