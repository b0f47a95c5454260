//! Address conversions (PTX ISA, "cvta", "isspacep", "mapa", "getctarank").

use smallvec::smallvec;

use super::requirement::{BASE, need};
use super::signature::{read, uniform, value, write};
use crate::verify::rules::{ensure, one_of};
use crate::{Requirement, Space, Type};

instructions! { ($) address address_list

    /// `d, a`: generic to space with `to_space`, else space to generic. PTX ISA, "cvta".
    Cvta {
        /// The space.
        space: Space,
        /// `.to`: from generic to `space`.
        to_space: bool,
        /// `.u32` or `.u64`.
        ty: Type,
    } => {
        text: |m| {
            m.head("cvta")?;
            m.flag(to_space, "to")?;
            m.space(space)?;
            if *space == Space::Generic {
                m.refuse("`cvta` needs a state space such as `.global`")?;
            }
            m.ty(ty)
        },
        operands: uniform(ty, 1),
        accepts: one_of("an address conversion", ty, &[Type::U32, Type::U64]),
        needs: space_requirement(space),
    }

    /// `p, a`: whether a generic address points into the space. PTX ISA, "isspacep".
    Isspacep(space: Space) => {
        text: |m| { m.head("isspacep")?; m.space(space) },
        operands: smallvec![write(value(Type::Pred)), read(value(Type::U64))],
        needs: space_requirement(space),
    }

    /// `d, a, b`: address of `a` in the CTA of rank `b` of the cluster. PTX ISA, "mapa".
    Mapa {
        /// `SharedCluster` when `.shared::cluster` is written, `Generic` otherwise.
        space: Space,
        /// `.u32` or `.u64`.
        ty: Type,
    } => {
        text: |m| { m.head("mapa")?; m.space(space)?; m.ty(ty) },
        operands: smallvec![write(value(ty)), read(value(ty)), read(value(Type::U32))],
        accepts: cluster_address(space, ty),
        needs: need(78, 90),
    }

    /// `d, a`: rank of the CTA that an address belongs to. PTX ISA, "getctarank".
    Getctarank {
        /// `SharedCluster` when written, `Generic` otherwise.
        space: Space,
        /// `.u32` or `.u64`.
        ty: Type,
    } => {
        text: |m| { m.head("getctarank")?; m.space(space)?; m.ty(ty) },
        operands: smallvec![write(value(Type::U32)), read(value(ty))],
        accepts: cluster_address(space, ty),
        needs: need(78, 90),
    }
}

fn space_requirement(space: Space) -> Requirement {
    match space {
        Space::SharedCluster => need(78, 90),
        Space::Param => need(77, 75),
        _ => BASE,
    }
}

fn cluster_address(space: Space, ty: Type) -> Result<(), String> {
    one_of("an address conversion", ty, &[Type::U32, Type::U64])?;
    ensure(matches!(space, Space::Generic | Space::SharedCluster), || {
        format!("an address of the cluster is in .shared::cluster, not in {}", space.suffix())
    })
}
