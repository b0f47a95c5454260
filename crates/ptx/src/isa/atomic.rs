//! Atomics and reductions on memory (PTX ISA, "atom", "red").

use smallvec::smallvec;

use super::is_bf16;
use super::memory::policy;
use super::requirement::{all, need, scope, when};
use super::signature::{address, read, scalar_or_vector, write};
use super::syntax::{Syntax, names, start};
use super::{MemSem, Scope};
use crate::verify::rules::{ensure, one_of};
use crate::{Requirement, Signature, Space, Type};

/// The operation of an atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the ISA's names")]
pub enum AtomicOp {
    And,
    Or,
    Xor,
    Exch,
    Cas,
    Add,
    Inc,
    Dec,
    Min,
    Max,
}

/// Modifiers of `atom` and `red`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Atomic {
    /// The operation.
    pub op: AtomicOp,
    /// State space.
    pub space: Space,
    /// Element type.
    pub ty: Type,
    /// Elements per access: 1, 2, 4 or 8.
    pub vector: u8,
    /// Ordering.
    pub sem: MemSem,
    /// Scope; `None` means gpu.
    pub scope: Option<Scope>,
    /// `.noftz` (f16, bf16).
    pub noftz: bool,
    /// `.L2::cache_hint`.
    pub cache_hint: bool,
}

names! {
    AtomicOp {
        And = "and", Or = "or", Xor = "xor", Exch = "exch", Cas = "cas", Add = "add", Inc = "inc",
        Dec = "dec",
        Min = "min", Max = "max",
    }
}

start! {
    Atomic = Atomic {
        op: AtomicOp::Add,
        space: Space::Generic,
        ty: Type::B32,
        vector: 1,
        sem: MemSem::Default,
        scope: None,
        noftz: false,
        cache_hint: false,
    };
}

/// How an error describes a missing operation.
pub(super) const OPERATION: &str = "an operation such as `.add`";

instructions! { ($) atomic atomic_list

    /// `d, [a], b, c?`, then a cache policy with `cache_hint`; `d` is the old value, `c` is for `cas`. Vector
    /// forms take vectors. PTX ISA, "atom".
    Atom(a: Atomic) => {
        text: |m| { m.head("atom")?; modifiers(m, a) },
        operands: {
            let operand = scalar_or_vector(a.ty, a.vector);
            let mut s: Signature = smallvec![write(operand), address(a.space), read(operand)];
            if a.op == AtomicOp::Cas {
                s.push(read(operand));
            }
            s.extend(policy(a.cache_hint));
            s
        },
        accepts: atomic("atom", &a),
        needs: atomic_requirement(&a),
        accesses: |_position| Some(a.ty.bytes() * u32::from(a.vector)),
    }

    /// `[a], b`, then a cache policy with `cache_hint`: an atomic without a result. PTX ISA, "red".
    Red(a: Atomic) => {
        text: |m| { m.head("red")?; modifiers(m, a) },
        operands: {
            let mut s: Signature = smallvec![address(a.space), read(scalar_or_vector(a.ty, a.vector))];
            s.extend(policy(a.cache_hint));
            s
        },
        accepts: {
            let returns = matches!(a.op, AtomicOp::Exch | AtomicOp::Cas);
            ensure(!returns, || format!("red has no .{}, because it returns no result", a.op.name()))?;
            ensure(!matches!(a.sem, MemSem::Acquire | MemSem::AcqRel), || {
                "red takes .relaxed or .release: it returns no value that could acquire".into()
            })?;
            atomic("red", &a)
        },
        needs: atomic_requirement(&a),
        accesses: |_position| Some(a.ty.bytes() * u32::from(a.vector)),
    }
}

fn modifiers<S: Syntax>(m: &mut S, a: &mut Atomic) -> Result<(), S::Stop> {
    m.ordering(&mut a.sem, &mut a.scope)?;
    m.space(&mut a.space)?;
    m.one(&mut a.op, OPERATION, AtomicOp::NAMES)?;
    m.flag(&mut a.noftz, "noftz")?;
    m.cache_hint(&mut a.cache_hint)?;
    m.vector(&mut a.vector)?;
    m.ty(&mut a.ty)
}

fn atomic_requirement(a: &Atomic) -> Requirement {
    all([
        scope(a.scope),
        when(a.space == Space::SharedCluster, need(78, 90)),
        when(is_bf16(a.ty), need(78, 90)),
        when(a.ty == Type::B128, need(83, 90)),
        when(a.vector > 1, need(81, 90)),
        when(a.cache_hint, need(74, 80)),
    ])
}

fn atomic(name: &str, a: &Atomic) -> Result<(), String> {
    use Type::{B16, B32, B64, B128, Bf16, Bf16x2, F16, F16x2, F32, F64, S32, S64, U32, U64};
    let what = format!("{name}.{}", a.op.name());
    let types: &[Type] = match a.op {
        AtomicOp::And | AtomicOp::Or | AtomicOp::Xor => &[B32, B64],
        AtomicOp::Exch => &[B32, B64, B128],
        AtomicOp::Cas => &[B16, B32, B64, B128],
        AtomicOp::Add => &[U32, S32, U64, F32, F64, F16, F16x2, Bf16, Bf16x2],
        AtomicOp::Inc | AtomicOp::Dec => &[U32],
        AtomicOp::Min | AtomicOp::Max if a.vector > 1 => &[F16, F16x2, Bf16, Bf16x2],
        AtomicOp::Min | AtomicOp::Max => &[U32, S32, U64, S64],
    };
    one_of(&what, a.ty, types)?;
    let global = matches!(a.space, Space::Global | Space::Generic);
    let shared = matches!(a.space, Space::Shared | Space::SharedCluster);
    ensure(global || shared, || format!("{what} works on .global and .shared, not on {}", a.space.suffix()))?;
    let half = matches!(a.ty, F16 | F16x2 | Bf16 | Bf16x2);
    ensure(a.noftz == half, || {
        if half { format!("{what}.{} needs .noftz", a.ty) } else { ".noftz is for 16-bit floats".into() }
    })?;
    let sem = matches!(
        a.sem,
        MemSem::Default | MemSem::Relaxed | MemSem::Acquire | MemSem::Release | MemSem::AcqRel
    );
    ensure(sem, || format!("{what} takes .relaxed, .acquire, .release or .acq_rel"))?;
    let vector = match (a.vector, a.ty) {
        (1, _) => true,
        (2 | 4, F32) | (2 | 4 | 8, F16 | Bf16) | (2 | 4, F16x2 | Bf16x2) => a.space == Space::Global,
        _ => false,
    };
    ensure(vector, || {
        format!("{what} has no .v{} of .{}; vectors are for floats in .global", a.vector, a.ty)
    })?;
    ensure(!a.cache_hint || global, || "a cache policy is for .global".into())
}
