use dp_core::{
    AdamW, BucketCaps, DdpConfig, DistributedDataParallel, Error, Optimizer, ParamGroups,
    ParamStore,
};
use dp_core::{Sgd, Trainer};
use serde_json::Value;

use crate::support::{builder, expect_error, ones, ranks, values};

/// Values from PyTorch; `fixtures/pytorch.py` made them.
pub fn fixture() -> Value {
    serde_json::from_str(include_str!("fixtures/pytorch.json")).expect("the fixture is JSON")
}

pub fn floats(v: &Value) -> Vec<f32> {
    let array = v.as_array().expect("an array of numbers");
    array
        .iter()
        .map(|x| x.as_f64().expect("a number") as f32)
        .collect()
}

pub fn number(case: &Value, name: &str) -> f64 {
    case[name].as_f64().expect("a number")
}

/// Follows one trajectory of the fixture, in pieces, as shards do.
fn follow(optimizer: &impl Optimizer, case: &Value) {
    let mut w = floats(&case["start"]);
    let mut state = vec![vec![0f32; w.len()]; optimizer.state_names().len()];
    let grads = case["grads"].as_array().expect("an array");
    let expected = case["expected"].as_array().expect("an array");
    assert!(grads.len() >= 5 && grads.len() == expected.len());
    for (step, (grad, expected)) in grads.iter().zip(expected).enumerate() {
        // Scaled on the way in, so that `grad_scale` counts.
        let grad: Vec<f32> = floats(grad).iter().map(|g| g * 4.0).collect();
        for range in [0..2, 2..5] {
            let mut parts: Vec<&mut [f32]> =
                state.iter_mut().map(|s| &mut s[range.clone()]).collect();
            let step = step as u64 + 1;
            optimizer.update(
                step,
                &mut w[range.clone()],
                &grad[range.clone()],
                0.25,
                &mut parts,
            );
        }
        for (x, y) in w.iter().zip(floats(expected)) {
            assert!(
                (x - y).abs() <= 1e-6,
                "step {step} of {optimizer:?}: {x} against {y}"
            );
        }
    }
}

#[test]
fn sgd_follows_pytorch() {
    let fixture = fixture();
    let cases = fixture["sgd"].as_array().expect("an array");
    assert_eq!(cases.len(), 10);
    for case in cases {
        let sgd = Sgd {
            lr: number(case, "lr"),
            momentum: number(case, "momentum"),
            dampening: number(case, "dampening"),
            weight_decay: number(case, "weight_decay"),
            nesterov: case["nesterov"].as_bool().expect("a flag"),
        };
        sgd.validate().expect("PyTorch accepts it");
        follow(&sgd, case);
    }
}

#[test]
fn adamw_follows_pytorch() {
    let fixture = fixture();
    for case in fixture["adamw"].as_array().expect("an array") {
        let adamw = AdamW {
            lr: number(case, "lr"),
            beta1: number(case, "beta1"),
            beta2: number(case, "beta2"),
            eps: number(case, "eps"),
            weight_decay: number(case, "weight_decay"),
        };
        adamw.validate().expect("PyTorch accepts it");
        follow(&adamw, case);
    }
    let default = &fixture["adamw"][0];
    assert_eq!(AdamW::default().lr, number(default, "lr"));
    assert_eq!(
        AdamW::default().weight_decay,
        number(default, "weight_decay")
    );
}

#[test]
fn a_parameter_belongs_to_the_first_group_that_takes_it() {
    let groups = ParamGroups::new(Sgd::new(1.0))
        .with_group("bias", |n| n.ends_with("bias"), Sgd::new(2.0))
        .with_group("head", |n| n.starts_with("head"), Sgd::new(3.0));
    let names = ["fc.weight", "fc.bias", "head.weight", "head.bias"];
    assert_eq!(names.map(|n| groups.group_of(n)), [0, 1, 2, 1]);
    assert_eq!(groups.groups()[2].name(), "head");
}

#[test]
fn groups_have_their_own_settings_and_learning_rates() {
    ranks(2, |rank| {
        let store = ParamStore::new(rank.device());
        let vb = builder(&store);
        let (weight, bias) = (ones(&vb, 3, "weight")?, ones(&vb, 4, "bias")?);
        let decay = Sgd {
            weight_decay: 1.0,
            ..Sgd::new(0.25)
        };
        // One keeps momentum, the other none: state is allocated for both.
        let groups = ParamGroups::new(decay).with_group(
            "no decay",
            |n| n == "bias",
            Sgd {
                momentum: 0.5,
                ..Sgd::new(0.125)
            },
        );
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), groups)?;
        trainer.backward(&(weight.sum_all()? + bias.sum_all()?)?)?;
        assert_eq!(*trainer.step()?.learning_rates, [0.25, 0.125]);
        assert_eq!(
            (values(&weight), values(&bias)),
            (vec![0.5; 3], vec![0.875; 4])
        );
        trainer.param_groups_mut()[1].optimizer.lr = 1.0;
        trainer.backward(&(weight.sum_all()? + bias.sum_all()?)?)?;
        assert_eq!(*trainer.step()?.learning_rates, [0.25, 1.0]);
        assert_eq!(
            (values(&weight), values(&bias)),
            (vec![0.125; 3], vec![-0.625; 4])
        );
        Ok(())
    });
}

#[test]
fn bad_settings_name_the_field_and_the_group() {
    fn refused<O: Optimizer + Sync>(field: &'static str, optimizer: O, good: O) {
        ranks(1, move |rank| {
            let store = ParamStore::new(rank.device());
            ones(&builder(&store), 3, "w")?;
            let groups =
                ParamGroups::new(good.clone()).with_group("head", |_| false, optimizer.clone());
            let result = DistributedDataParallel::new(store, rank.comm(), groups);
            let error = expect_error(result, &[field, "`head`"]);
            assert!(matches!(error, Error::InvalidArgument { what, .. } if what == field));
            Ok(())
        });
    }
    let adamw = AdamW::default();
    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        refused(
            "lr",
            AdamW {
                lr: bad,
                ..adamw.clone()
            },
            adamw.clone(),
        );
        refused(
            "eps",
            AdamW {
                eps: bad,
                ..adamw.clone()
            },
            adamw.clone(),
        );
        refused(
            "weight_decay",
            AdamW {
                weight_decay: bad,
                ..adamw.clone()
            },
            adamw.clone(),
        );
        refused("lr", Sgd::new(bad), Sgd::new(0.1));
        refused(
            "momentum",
            Sgd {
                momentum: bad,
                ..Sgd::new(0.1)
            },
            Sgd::new(0.1),
        );
        refused(
            "weight_decay",
            Sgd {
                weight_decay: bad,
                ..Sgd::new(0.1)
            },
            Sgd::new(0.1),
        );
    }
    for bad in [1.0, -0.1, f64::NAN] {
        refused(
            "beta1",
            AdamW {
                beta1: bad,
                ..adamw.clone()
            },
            adamw.clone(),
        );
        refused(
            "beta2",
            AdamW {
                beta2: bad,
                ..adamw.clone()
            },
            adamw.clone(),
        );
    }
    refused(
        "dampening",
        Sgd {
            dampening: f64::NAN,
            ..Sgd::new(0.1)
        },
        Sgd::new(0.1),
    );
    refused(
        "nesterov",
        Sgd {
            nesterov: true,
            ..Sgd::new(0.1)
        },
        Sgd::new(0.1),
    );
    let damped = Sgd {
        nesterov: true,
        momentum: 0.9,
        dampening: 0.1,
        ..Sgd::new(0.1)
    };
    refused("nesterov", damped, Sgd::new(0.1));
}

#[test]
fn momentum_cannot_be_switched_on_without_state() {
    ranks(2, |rank| {
        let store = ParamStore::new(rank.device());
        let w = ones(&builder(&store), 3, "w")?;
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.25))?;
        trainer.param_groups_mut()[0].optimizer.momentum = 0.9;
        trainer.backward(&w.sum_all()?)?;
        expect_error(trainer.step(), &["state", "momentum"]);
        trainer.param_groups_mut()[0].optimizer.momentum = 0.0;
        trainer.step()?;
        assert_eq!(values(&w), [0.75; 3]);
        Ok(())
    });
}

#[test]
fn a_cap_of_one_byte_is_a_bucket_per_parameter() {
    ranks(2, |rank| {
        let store = ParamStore::new(rank.device());
        let vb = builder(&store);
        let w = [3, 1, 2].map(|n| ones(&vb, n, &format!("w{n}")));
        let config = DdpConfig::default().with_bucket_caps(BucketCaps::new(1)?);
        let mut trainer =
            DistributedDataParallel::with_config(store, rank.comm(), AdamW::with_lr(0.5), config)?;
        assert_eq!(trainer.layout().buckets().len(), 3);
        let [a, b, c] = w;
        let (a, b, c) = (a?, b?, c?);
        trainer.backward(&((a.sum_all()? + b.sum_all()?)? + c.sum_all()?)?)?;
        trainer.step()?;
        // AdamW's first step: decay by 0.5 * 0.01, then the learning rate.
        assert!(
            [a, b, c]
                .iter()
                .flat_map(values)
                .all(|x| (x - 0.495).abs() < 1e-6)
        );
        Ok(())
    });
}
