//! Which types and modifiers go together, for everything but plain arithmetic.

use super::forms;
use crate::*;
use Type::*;

/// What is wrong with the modifiers of an operation, if anything; reads on after the mnemonic.
pub(super) fn wrong(op: &Op) -> Option<String> {
    let unless = |known: bool, ty: Type| (!known).then(|| format!("does not know `.{ty}`"));
    match *op {
        Op::Unary(..) | Op::Binary(..) | Op::Ternary(..) => forms::arithmetic(op),
        Op::Carry(_, ty) | Op::Bfe(ty) => unless(matches!(ty, U32 | S32 | U64 | S64), ty),
        Op::Setp { cmp, ty, ftz, .. } => forms::comparison(cmp, ty, ftz),
        Op::Set { cmp, to, ty, ftz, .. } => forms::comparison(cmp, ty, ftz)
            .or_else(|| unless(matches!(to, U32 | S32 | F32 | U16 | S16 | F16 | Bf16 | F16x2 | Bf16x2), to)),
        Op::Selp(ty) => unless(is_word(ty), ty),
        Op::Slct { ty, cond, ftz } => unless(is_word(ty), ty)
            .or_else(|| unless(matches!(cond, S32 | F32), cond))
            .or_else(|| (ftz && cond != F32).then(|| "knows `.ftz` with `.f32` only".to_owned())),
        Op::Testp(_, ty) => unless(matches!(ty, F32 | F64), ty),
        Op::Bfi(ty) => unless(matches!(ty, B32 | B64), ty),
        Op::Szext(_, ty) | Op::Dp4a(ty, U32 | S32) | Op::Dp2a(_, ty, U32 | S32) => {
            unless(matches!(ty, U32 | S32), ty)
        }
        Op::Dp4a(_, ty) | Op::Dp2a(_, _, ty) => unless(false, ty),
        Op::Mov(ty) => unless(is_word(ty) || matches!(ty, Pred | B128), ty),
        Op::Cvt(cvt) => forms::conversion(&cvt),
        Op::Cvta { ty, .. } | Op::Mapa { ty, .. } | Op::Getctarank { ty, .. } => {
            unless(matches!(ty, U64 | U32), ty)
        }
        Op::Ld(m) => memory(&m).or_else(|| load(&m)),
        Op::St(m) => memory(&m).or_else(|| store(&m)),
        Op::Atom(a) => atomic(&a),
        Op::Red(a) if matches!(a.op, AtomicOp::Exch | AtomicOp::Cas) => {
            Some(format!("does not know `.{}`; `atom` does", a.op.name()))
        }
        Op::Red(a) => atomic(&a),
        Op::Ldmatrix(m) | Op::Stmatrix(m) => matrix(&m),
        Op::Mma(mma) => product(&mma),
        Op::Match(_, ty) => unless(matches!(ty, B32 | B64), ty),
        Op::Redux { op, ty, abs, nan } => redux(op, ty, abs || nan),
        Op::CpAsync(copy) if copy.cache == CacheOp::Ca || copy.cache == CacheOp::Cg => None,
        Op::CpAsync(_) => Some("knows the cache operators `.ca` and `.cg` only".to_owned()),
        Op::Prefetch(space, _)
            if !matches!(
                space,
                Space::Generic | Space::Global | Space::Local | Space::Const | Space::Param
            ) =>
        {
            Some(format!("does not know `{}`", space.suffix()))
        }
        Op::Discard(space) if !matches!(space, Space::Generic | Space::Global) => {
            Some("works on global memory only".to_owned())
        }
        _ => None,
    }
}

/// What a general register holds.
const fn is_word(ty: Type) -> bool {
    matches!(ty, B16 | B32 | B64 | U16 | U32 | U64 | S16 | S32 | S64 | F32 | F64)
}

fn memory(m: &Memory) -> Option<String> {
    let scalar = is_word(m.ty) || matches!(m.ty, B8 | U8 | S8 | B128);
    if !scalar {
        return Some(format!("does not know `.{}`; use the `.b` type of its width", m.ty));
    }
    if !matches!(m.vector, 1 | 2 | 4 | 8) || m.bytes() > 32 || (m.bytes() > 16 && m.space != Space::Global) {
        return Some(format!("cannot move {} elements of `.{}` at once", m.vector, m.ty));
    }
    let scoped = matches!(m.sem, MemSem::Relaxed | MemSem::Acquire | MemSem::Release | MemSem::Mmio);
    if scoped != m.scope.is_some() {
        let text =
            if scoped { "needs a scope with this ordering" } else { "takes a scope with an ordering only" };
        return Some(text.to_owned());
    }
    if m.sem == MemSem::Mmio && m.scope != Some(Scope::Sys) {
        return Some("knows `.mmio` at `.sys` scope only".to_owned());
    }
    if m.cache.is_some() && (scoped || m.sem == MemSem::Volatile) {
        return Some("takes a cache operator with weak accesses only".to_owned());
    }
    let ordered = scoped || m.sem == MemSem::Volatile;
    let shared_by_threads =
        matches!(m.space, Space::Generic | Space::Global | Space::Shared | Space::SharedCluster);
    (ordered && !shared_by_threads && m.sem != MemSem::Volatile)
        .then(|| format!("orders nothing in `{}`", m.space.suffix()))
}

fn load(m: &Memory) -> Option<String> {
    if matches!(m.sem, MemSem::Release | MemSem::AcqRel) {
        return Some("does not know `.release`; a store does".to_owned());
    }
    if matches!(m.cache, Some(CacheOp::Wb | CacheOp::Wt)) {
        return Some("takes the cache operators of loads: `.ca`, `.cg`, `.cs`, `.lu`, `.cv`".to_owned());
    }
    (m.non_coherent && m.space != Space::Global).then(|| "knows `.nc` with `.global` only".to_owned())
}

fn store(m: &Memory) -> Option<String> {
    if matches!(m.sem, MemSem::Acquire | MemSem::AcqRel) {
        return Some("does not know `.acquire`; a load does".to_owned());
    }
    if matches!(m.cache, Some(CacheOp::Ca | CacheOp::Lu | CacheOp::Cv)) {
        return Some("takes the cache operators of stores: `.wb`, `.cg`, `.cs`, `.wt`".to_owned());
    }
    if m.non_coherent || m.ldu || m.unified {
        return Some("does not know the modifiers of read-only loads".to_owned());
    }
    (m.space == Space::Const).then(|| "cannot write constant memory".to_owned())
}

fn atomic(a: &Atomic) -> Option<String> {
    if !matches!(a.space, Space::Generic | Space::Global | Space::Shared | Space::SharedCluster) {
        return Some(format!("does not know `{}`", a.space.suffix()));
    }
    if matches!(a.sem, MemSem::Weak | MemSem::Volatile | MemSem::Mmio) {
        return Some("knows the orderings `.relaxed`, `.acquire`, `.release` and `.acq_rel` only".to_owned());
    }
    let halves = matches!(a.ty, F16 | F16x2 | Bf16 | Bf16x2);
    let known = match a.op {
        AtomicOp::And | AtomicOp::Or | AtomicOp::Xor => matches!(a.ty, B32 | B64),
        AtomicOp::Exch => matches!(a.ty, B32 | B64 | B128),
        AtomicOp::Cas => matches!(a.ty, B16 | B32 | B64 | B128),
        AtomicOp::Add => matches!(a.ty, U32 | S32 | U64 | F32 | F64) || halves,
        AtomicOp::Inc | AtomicOp::Dec => a.ty == U32,
        AtomicOp::Min | AtomicOp::Max => matches!(a.ty, U32 | S32 | U64 | S64) || (a.vector > 1 && halves),
    };
    if !known {
        return Some(format!("does not know `.{}` with `.{}`", a.op.name(), a.ty));
    }
    if halves != a.noftz {
        return Some("takes `.noftz` with f16 and bf16, and needs it there".to_owned());
    }
    let vector = a.vector == 1 || (a.space == Space::Global && (halves || a.ty == F32));
    (!vector).then(|| "knows vectors of floats in global memory only".to_owned())
}

fn matrix(m: &MatrixAccess) -> Option<String> {
    let known = match m.shape {
        MatrixShape::M8N8 => m.ty == B16,
        MatrixShape::M16N8 | MatrixShape::M16N16 => m.ty == B8 && m.trans,
        MatrixShape::M8N16 => m.ty == B8,
    };
    if !known {
        return Some(format!("does not know `.{}` with `.{}`", m.shape.name(), m.ty));
    }
    (!matches!(m.space, Space::Generic | Space::Shared)).then(|| "works on shared memory only".to_owned())
}

/// Shapes and types of `mma` (PTX ISA, "Matrix multiply-accumulate operation using mma instruction").
fn product(mma: &Mma) -> Option<String> {
    let MmaShape { m, n, k } = mma.shape;
    let fp8 = |ty| matches!(ty, E4m3 | E5m2);
    let known = match mma.a {
        F16 => {
            let accumulators = matches!(mma.d, F16 | F32) && matches!(mma.c, F16 | F32);
            mma.b == F16 && accumulators && matches!((m, n, k), (8, 8, 4) | (16, 8, 8) | (16, 8, 16))
        }
        Bf16 => (mma.b, mma.c, mma.d) == (Bf16, F32, F32) && matches!((m, n, k), (16, 8, 8) | (16, 8, 16)),
        Tf32 => (mma.b, mma.c, mma.d) == (Tf32, F32, F32) && matches!((m, n, k), (16, 8, 4) | (16, 8, 8)),
        F64 => {
            (mma.b, mma.c, mma.d) == (F64, F64, F64)
                && matches!((m, n, k), (8, 8, 4) | (16, 8, 4) | (16, 8, 8) | (16, 8, 16))
        }
        E4m3 | E5m2 => {
            fp8(mma.b)
                && mma.c == mma.d
                && matches!(mma.c, F16 | F32)
                && matches!((m, n, k), (16, 8, 16) | (16, 8, 32))
        }
        S8 | U8 => {
            matches!(mma.b, S8 | U8)
                && (mma.c, mma.d) == (S32, S32)
                && matches!((m, n, k), (8, 8, 16) | (16, 8, 16) | (16, 8, 32))
        }
        S4 | U4 => {
            matches!(mma.b, S4 | U4)
                && (mma.c, mma.d) == (S32, S32)
                && matches!((m, n, k), (8, 8, 32) | (16, 8, 32) | (16, 8, 64))
        }
        _ => false,
    };
    if !known {
        let Mma { a, b, c, d, .. } = mma;
        return Some(format!("does not multiply m{m}n{n}k{k} of `.{d}.{a}.{b}.{c}`"));
    }
    let volta = (m, n, k) == (8, 8, 4) && mma.a == F16;
    if !volta && (mma.a_order, mma.b_order) != (MatrixOrder::Row, MatrixOrder::Col) {
        return Some("takes A by rows and B by columns".to_owned());
    }
    (mma.satfinite && mma.c != S32).then(|| "knows `.satfinite` with integers only".to_owned())
}

fn redux(op: ReduxOp, ty: Type, float_flags: bool) -> Option<String> {
    let known = match op {
        ReduxOp::Add => matches!(ty, U32 | S32),
        ReduxOp::Min | ReduxOp::Max => matches!(ty, U32 | S32 | F32),
        ReduxOp::And | ReduxOp::Or | ReduxOp::Xor => ty == B32,
    };
    if !known {
        return Some(format!("does not know `.{}` with `.{ty}`", op.name()));
    }
    (float_flags && ty != F32).then(|| "knows `.abs` and `.NaN` with `.f32` only".to_owned())
}
