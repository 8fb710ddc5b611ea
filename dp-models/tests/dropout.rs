use candle_core::{DType, Device, Tensor, Var};
use candle_nn::ModuleT;
use dp_models::Dropout;

fn masks(p: f64, seed: u64, len: usize) -> Vec<f32> {
    let ones = Tensor::ones(len, DType::F32, &Device::Cpu).unwrap();
    let dropout = Dropout::new(p, seed).unwrap();
    let y = dropout.forward_t(&ones, true).unwrap();
    y.to_vec1().unwrap()
}

#[test]
fn it_drops_at_its_rate_and_keeps_the_mean() {
    for p in [0.1, 0.5, 0.9] {
        let y = masks(p, 3, 20_000);
        let dropped = y.iter().filter(|y| **y == 0.).count() as f64 / 20_000.;
        // Four standard deviations of a binomial count.
        assert!(
            (dropped - p).abs() < 4. * (p * (1. - p) / 20_000.).sqrt(),
            "{p}: {dropped}"
        );
        assert!(
            y.iter()
                .all(|y| *y == 0. || (f64::from(*y) - 1. / (1. - p)).abs() < 1e-6)
        );
    }
}

#[test]
fn masks_follow_from_the_seed_and_go_on() {
    assert_eq!(masks(0.5, 7, 1000), masks(0.5, 7, 1000));
    let agree = |a: &[f32], b: &[f32]| a.iter().zip(b).filter(|(a, b)| a == b).count();
    let same = agree(&masks(0.5, 7, 1000), &masks(0.5, 8, 1000));
    assert!((400..600).contains(&same), "{same} of 1000");

    let ones = Tensor::ones(1000, DType::F32, &Device::Cpu).unwrap();
    let dropout = Dropout::new(0.5, 7).unwrap();
    let draw = || {
        dropout
            .forward_t(&ones, true)
            .unwrap()
            .to_vec1::<f32>()
            .unwrap()
    };
    let (first, second) = (draw(), draw());
    assert_ne!(first, second);
}

#[test]
fn the_gradient_passes_where_the_value_does() {
    let x = Var::ones(50, DType::F32, &Device::Cpu).unwrap();
    let y = Dropout::new(0.5, 1).unwrap().forward_t(&x, true).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    let grad = grads.get(&x).unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(grad, y.to_vec1::<f32>().unwrap());
}

#[test]
fn evaluation_and_p_0_change_nothing_and_16_bit_stays_16_bit() {
    let x = Tensor::new(&[1f32, -2.], &Device::Cpu).unwrap();
    for (p, train) in [(0.5, false), (0., true)] {
        let y = Dropout::new(p, 0).unwrap().forward_t(&x, train).unwrap();
        assert_eq!(y.to_vec1::<f32>().unwrap(), [1., -2.]);
    }
    let half = x.to_dtype(DType::BF16).unwrap();
    let y = Dropout::new(0.5, 0)
        .unwrap()
        .forward_t(&half, true)
        .unwrap();
    assert_eq!(y.dtype(), DType::BF16);
}

#[test]
fn impossible_rates_are_refused() {
    for p in [1., -0.1, f64::NAN] {
        let error = Dropout::new(p, 0).unwrap_err().to_string();
        assert!(error.contains("Dropout: p"), "{error}");
    }
}
