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

{{- /* The kubelet's variables for Services of the namespace look like this program's and vLLM's own: FOREWORD_ROUTER_PORT,
VLLM_PORT. Argument: further fields of the pod. */}}
{{- define "foreword.serviceLinks" -}}
{{- if not (hasKey (. | default dict) "enableServiceLinks") -}}
enableServiceLinks: false
{{- end }}
{{- end }}

{{- define "foreword.podSecurity" -}}
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "foreword.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}
