{{- define "foreword.labels" -}}
app.kubernetes.io/name: foreword
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "foreword.selector" -}}
app.kubernetes.io/name: foreword
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- /* The router's services, one a line: those of the values, and those of the chart's own servers. */}}
{{- define "foreword.services" -}}
{{- range .Values.router.services }}
{{ if hasPrefix "/" . }}{{ $.Release.Namespace }}{{ end }}{{ . }}
{{- end }}
{{- range $name, $server := .Values.servers }}
{{ $.Release.Namespace }}/{{ $.Release.Name }}-{{ $name }}:http role={{ $server.role | default "both" }}
{{- end }}
{{- end }}

{{- /* The picker's objectives, one a line: those of the values, and those of the chart's own pool. */}}
{{- define "foreword.objectives" -}}
{{- with .Values.picker }}
{{- if .enabled }}
{{- range .objectives }}
{{ . }}
{{- end }}
{{- if and .inferencePool.create .inferencePool.objectives }}
{{ $.Release.Namespace }}/{{ $.Release.Name }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The kubelet's variables for Services of the namespace look like this program's and vLLM's own: FOREWORD_ROUTER_PORT,
VLLM_PORT. Argument: further fields of the pod. */}}
{{- define "foreword.serviceLinks" -}}
{{- if not (hasKey (. | default dict) "enableServiceLinks") -}}
enableServiceLinks: false
{{- end }}
{{- end }}

{{- /* The security contexts of pods and containers. The user is that of the chart's images; an image of vLLM has root, which a
server does not need. Argument: further fields, which go first. */}}
{{- define "foreword.podSecurity" -}}
{{- $own := dict "runAsNonRoot" true "runAsUser" 65532 "runAsGroup" 65532 "fsGroup" 65532 "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") }}
{{- mergeOverwrite $own (. | default dict) | toYaml }}
{{- end }}

{{- define "foreword.containerSecurity" -}}
{{- $own := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) }}
{{- mergeOverwrite $own (. | default dict) | toYaml }}
{{- end }}

{{- /* Spreads the pods of a workload over nodes and zones, where there is room. Arguments: its selector, and further fields of the
pod, which may say otherwise. */}}
{{- define "foreword.spread" -}}
{{- if not (hasKey (.pod | default dict) "topologySpreadConstraints") -}}
topologySpreadConstraints:
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- $.selector | nindent 6 }}
{{- end }}
{{- end }}
{{- end }}

{{- /* One pod may leave at a time. A pod that is not ready may always: a drain must not wait for one that never will be.
Arguments: root, name, selector. */}}
{{- define "foreword.disruptions" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels: {{- include "foreword.labels" .root | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- .selector | nindent 6 }}
{{- end }}

{{- /* A size as bytes: 200GiB and 500MB, as in the URLs of stores, or 220Gi and 500M, as in Kubernetes. */}}
{{- define "foreword.bytes" -}}
{{- $units := dict "" 1 "b" 1 "k" 1024 "ki" 1024 "kib" 1024 "kb" 1000 "m" 1048576 "mi" 1048576 "mib" 1048576 "mb" 1000000 "g" 1073741824 "gi" 1073741824 "gib" 1073741824 "gb" 1000000000 "t" 1099511627776 "ti" 1099511627776 "tib" 1099511627776 "tb" 1000000000000 }}
{{- $unit := lower (regexFind "[A-Za-z]*$" (toString .)) }}
{{- mulf (float64 (regexFind "^[0-9.]+" (toString .))) (get $units $unit) | int64 }}
{{- end }}

{{- /* Refuses a server whose disk stores may grow beyond the volume that they lie on: the kubelet would evict the pod. Arguments:
the server's name and values. Without size= a disk store has 64 GiB. */}}
{{- define "foreword.checkDisks" -}}
{{- if hasKey (.server.cache | default dict) "sizeLimit" }}
{{- $wanted := 0 }}
{{- range .server.stores }}
{{- if hasPrefix "disk:///cache" . }}
{{- $size := regexFind "[?&]size=[^&]*" . | default "?size=64GiB" | trimPrefix "?" | trimPrefix "&" | trimPrefix "size=" }}
{{- $wanted = add $wanted (include "foreword.bytes" $size | int64) }}
{{- end }}
{{- end }}
{{- if gt ($wanted | int64) (include "foreword.bytes" .server.cache.sizeLimit | int64) }}
{{- fail (printf "servers.%s: its disk stores may take more than cache.sizeLimit %v, and the kubelet would evict the pod" .name .server.cache.sizeLimit) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* A volume without its name. Argument: its kind with settings, those of an emptyDir alone, or nothing for a plain emptyDir. */}}
{{- define "foreword.volume" -}}
{{- if or (not .) (hasKey . "sizeLimit") (hasKey . "medium") -}}
{{- toYaml (dict "emptyDir" (. | default dict)) }}
{{- else -}}
{{- toYaml . }}
{{- end }}
{{- end }}
