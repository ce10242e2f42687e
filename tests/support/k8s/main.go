// What the operator and Kubernetes make of manifests.
//
//	k8s NAMESPACE < manifests.yaml > findings.json
//
// Each object is decoded into the types of whoever will read it, and a field that they do not have is
// a fault. Ray's go through the operator's own checks; the pods that it would make of them come out,
// each with the strictest level of pod security that admits it.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	rayv1 "github.com/ray-project/kuberay/ray-operator/apis/ray/v1"
	"github.com/ray-project/kuberay/ray-operator/controllers/ray/common"
	"github.com/ray-project/kuberay/ray-operator/controllers/ray/utils"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
)

// Pod is one that the operator would make.
type Pod struct {
	Of    string      `json:"of"`
	Level api.Level   `json:"level"`
	Why   string      `json:"why"`
	Pod   *corev1.Pod `json:"pod"`
}

// Findings are what is written to standard output.
type Findings struct {
	Kinds  []string `json:"kinds"`
	Faults []string `json:"faults"`
	Pods   []Pod    `json:"pods"`
}

func (f *Findings) check(of string, err error) {
	if err != nil {
		f.Faults = append(f.Faults, fmt.Sprintf("%s: %v", of, err))
	}
}

func kinds() *runtime.Scheme {
	known := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		scheme.AddToScheme, rayv1.AddToScheme, monitoringv1.AddToScheme,
	} {
		if err := add(known); err != nil {
			panic(err)
		}
	}
	return known
}

// levelOf is the strictest level that admits a pod, and what the next stricter one has against it.
func levelOf(evaluator policy.Evaluator, meta *metav1.ObjectMeta, spec *corev1.PodSpec) (api.Level, string) {
	why := ""
	for _, level := range []api.Level{api.LevelRestricted, api.LevelBaseline} {
		version := api.LevelVersion{Level: level, Version: api.LatestVersion()}
		result := policy.AggregateCheckResults(evaluator.EvaluatePod(version, meta, spec))
		if result.Allowed {
			return level, why
		}
		why = result.ForbiddenDetail()
	}
	return api.LevelPrivileged, why
}

// podsOf are the pods of a cluster, as the controller builds them: the head, and one of each group.
func podsOf(cluster rayv1.RayCluster) []*corev1.Pod {
	ctx := context.Background()
	spec := &cluster.Spec
	creator := utils.GetCRDType(cluster.Labels[utils.RayOriginatedFromCRDLabelKey])
	address := utils.GenerateFQDNServiceName(ctx, cluster, cluster.Namespace)
	port := common.GetHeadPort(spec.HeadGroupSpec.RayStartParams)
	scales := utils.IsAutoscalingEnabled(spec)

	name := utils.PodName(cluster.Name, rayv1.HeadNode, true)
	template := common.DefaultHeadPodTemplate(ctx, cluster, spec.HeadGroupSpec, name, port)
	head := common.BuildPod(ctx, template, rayv1.HeadNode, spec.HeadGroupSpec.RayStartParams, port,
		scales, creator, address, nil, spec.RayVersion)
	pods := []*corev1.Pod{&head}
	for _, group := range spec.WorkerGroupSpecs {
		name := utils.PodName(cluster.Name+"-"+group.GroupName, rayv1.WorkerNode, true)
		template := common.DefaultWorkerPodTemplate(ctx, cluster, group, name, address, port, "", 0, 0)
		pod := common.BuildPod(ctx, template, rayv1.WorkerNode, group.RayStartParams, port, scales,
			creator, address, nil, spec.RayVersion)
		pods = append(pods, &pod)
	}
	return pods
}

func (f *Findings) look(of string, object runtime.Object, namespace string, evaluator policy.Evaluator) {
	var cluster *rayv1.RayCluster
	switch it := object.(type) {
	case *rayv1.RayCluster:
		f.check(of, utils.ValidateRayClusterMetadata(it.ObjectMeta))
		f.check(of, utils.ValidateRayClusterSpec(&it.Spec, it.Annotations))
		f.check(of, utils.ValidateRayClusterUpgradeOptions(it))
		cluster = it
	case *rayv1.RayService:
		f.check(of, utils.ValidateRayServiceMetadata(it.ObjectMeta))
		f.check(of, utils.ValidateRayServiceSpec(it))
		cluster = &rayv1.RayCluster{ObjectMeta: metav1.ObjectMeta{
			Name:   it.Name + "-abcde",
			Labels: map[string]string{utils.RayOriginatedFromCRDLabelKey: string(utils.RayServiceCRD)},
		}, Spec: it.Spec.RayClusterSpec}
	case *rayv1.RayJob:
		f.check(of, utils.ValidateRayJobMetadata(it.ObjectMeta))
		f.check(of, utils.ValidateRayJobSpec(it))
		if it.Spec.RayClusterSpec != nil {
			cluster = &rayv1.RayCluster{ObjectMeta: metav1.ObjectMeta{
				Name:   it.Name + "-abcde",
				Labels: map[string]string{utils.RayOriginatedFromCRDLabelKey: string(utils.RayJobCRD)},
			}, Spec: *it.Spec.RayClusterSpec}
		}
	}
	if cluster == nil {
		return
	}
	cluster.Namespace = namespace
	for _, pod := range podsOf(*cluster) {
		level, why := levelOf(evaluator, &pod.ObjectMeta, &pod.Spec)
		f.Pods = append(f.Pods, Pod{Of: of, Level: level, Why: why, Pod: pod})
	}
}

func run(namespace string, from io.Reader) (*Findings, error) {
	decoder := serializer.NewCodecFactory(kinds(), serializer.EnableStrict).UniversalDeserializer()
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		return nil, err
	}
	found := &Findings{Kinds: []string{}, Faults: []string{}, Pods: []Pod{}}
	documents := utilyaml.NewYAMLReader(bufio.NewReader(from))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return found, nil
		}
		if err != nil {
			return nil, err
		}
		if len(bytes.TrimSpace(document)) == 0 {
			continue
		}
		object, kind, err := decoder.Decode(document, nil, nil)
		of := "?"
		if kind != nil {
			of = kind.Kind
		}
		if err != nil {
			found.check(of, err)
			continue
		}
		found.Kinds = append(found.Kinds, of)
		found.look(of, object, namespace, evaluator)
	}
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: k8s NAMESPACE < manifests.yaml")
		os.Exit(2)
	}
	found, err := run(os.Args[1], os.Stdin)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(found)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
